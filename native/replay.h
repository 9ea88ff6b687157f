/* Which packet numbers have come: each is taken once, and none that is older than the window. */
#ifndef LC_REPLAY_H
#define LC_REPLAY_H

#include <stdint.h>

enum { LC_REPLAY_WORDS = 257, LC_REPLAY_WINDOW = 64 * (LC_REPLAY_WORDS - 1) };

/* Zeros: nothing has come. */
typedef struct {
    uint64_t next;                  /* the highest number that has come, + 1 */
    uint64_t bits[LC_REPLAY_WORDS]; /* a ring of words, by number / 64 */
} lc_replay;

/* Whether the number has neither come nor is older than the window, which reaches LC_REPLAY_WINDOW
 * numbers back. */
static inline int lc_replay_is_new(const lc_replay *r, uint64_t number) {
    if (number >= r->next)
        return number != UINT64_MAX;
    return r->next - number <= LC_REPLAY_WINDOW &&
           !(r->bits[number / 64 % LC_REPLAY_WORDS] >> number % 64 & 1);
}

/* A number that is new has come. The word that the highest one is in may have bits of numbers that
 * are older by a whole ring, as those between may: they are cleared when they are entered. */
static inline void lc_replay_note(lc_replay *r, uint64_t number) {
    if (number >= r->next) {
        uint64_t word = r->next ? (r->next - 1) / 64 : UINT64_MAX, last = number / 64;
        uint64_t ahead = last - word;
        for (uint64_t i = 1; i <= ahead && i <= LC_REPLAY_WORDS; i++)
            r->bits[(word + i) % LC_REPLAY_WORDS] = 0;
        r->next = number + 1;
    }
    r->bits[number / 64 % LC_REPLAY_WORDS] |= 1ull << number % 64;
}

#endif
