/* Copies past the caches; see copy.h. */
#include "copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

enum { LINE = 64 };

/* SSE2 is part of x86-64, and its stores fill the processor's write-combining buffers as fast as
 * wider ones do. */
void lc_copy_past_caches(void *to, const void *from, size_t bytes) {
    char *dst = to;
    const char *src = from;
    size_t before = -(uintptr_t)dst & (LINE - 1);
    before = before < bytes ? before : bytes;
    memcpy(dst, src, before);
    dst += before;
    src += before;
    bytes -= before;
    for (; bytes >= LINE; bytes -= LINE, dst += LINE, src += LINE) {
        const __m128i *in = (const __m128i *)(const void *)src;
        __m128i *out = (__m128i *)(void *)dst;
        __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
        __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    memcpy(dst, src, bytes);
    _mm_sfence(); /* such stores are not ordered by the locks and flags that tell of them */
}
#else
void lc_copy_past_caches(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}
#endif
