/* mad for one instruction set; gf.c includes this once for each, with
 *   TARGET        the function attribute that allows the instructions
 *   VARIANT       the suffix of the names
 *   VECTOR        a register, of VECTOR_BYTES bytes
 *   FACTOR        what a row needs to multiply by its factor
 *   SPLIT         what all rows need of a register's worth of source
 *   FACTOR_OF(c), SPLIT_OF(v), PRODUCT(split, factor)  which make these, and a VECTOR of them
 *
 * A few rows are done in one pass, so that the source is read and split once for all of them. */
#define NAME(name) JOIN2(name, VARIANT)
#define INLINE     TARGET static inline __attribute__((always_inline))

INLINE VECTOR NAME(load)(const uint8_t *p) {
    VECTOR v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void NAME(add)(uint8_t *into, VECTOR product) {
    VECTOR v = NAME(load)(into) ^ product;
    memcpy(into, &v, sizeof v);
}

/* Fewer bytes than a register has. */
INLINE void NAME(short_pass)(uint8_t *const *into, const FACTOR *by, uint32_t rows,
                             const uint8_t *from, size_t n) {
    uint8_t source[VECTOR_BYTES] = {0}, sum[VECTOR_BYTES] = {0};
    memcpy(source, from, n);
    SPLIT split = SPLIT_OF(NAME(load)(source));
    for (uint32_t r = 0; r < rows; r++) {
        memcpy(sum, into[r], n);
        NAME(add)(sum, PRODUCT(split, by[r]));
        memcpy(into[r], sum, n);
    }
}

/* One register of each row. Spelled out, since compilers don't unroll a loop at -O2. */
INLINE void NAME(add_each)(uint8_t *const *into, size_t at, SPLIT split, const FACTOR *by,
                           uint32_t rows) {
    NAME(add)(into[0] + at, PRODUCT(split, by[0]));
    if (rows > 1)
        NAME(add)(into[1] + at, PRODUCT(split, by[1]));
    if (rows > 2)
        NAME(add)(into[2] + at, PRODUCT(split, by[2]));
    if (rows > 3)
        NAME(add)(into[3] + at, PRODUCT(split, by[3]));
}

/* rows is a constant wherever this is used. */
INLINE void NAME(pass)(uint8_t *const *to, const uint8_t *factors, uint32_t rows,
                       const uint8_t *from, size_t n) {
    FACTOR by[ROWS_OF_PASS];
    uint8_t *into[ROWS_OF_PASS]; /* copies, which a store can't change */
    for (uint32_t r = 0; r < rows; r++) {
        by[r] = FACTOR_OF(factors[r]);
        into[r] = to[r];
    }
    if (n < VECTOR_BYTES) {
        NAME(short_pass)(into, by, rows, from, n);
        return;
    }
    /* The last bytes first, as a whole register of which the rest is zeros: after the others it
     * would wait for stores to the same bytes. */
    size_t rest = n % VECTOR_BYTES;
    if (rest) {
        size_t at = n - VECTOR_BYTES;
        VECTOR kept = NAME(load)(zeros_then_ones + ONES_AT - VECTOR_BYTES + rest);
        NAME(add_each)(into, at, SPLIT_OF(NAME(load)(from + at) & kept), by, rows);
    }
    for (size_t at = 0; at < n - rest; at += VECTOR_BYTES)
        NAME(add_each)(into, at, SPLIT_OF(NAME(load)(from + at)), by, rows);
}

TARGET static void NAME(mad)(uint8_t *const *into, const uint8_t *factors, uint32_t rows,
                             const uint8_t *from, size_t n) {
    if (rows % ROWS_OF_PASS == 1 && factors[0] == 1) { /* parity that is one XOR, say */
        add_bytes(into[0], from, n);
        into++;
        factors++;
        rows--;
    }
    for (; rows >= ROWS_OF_PASS; rows -= ROWS_OF_PASS) {
        NAME(pass)(into, factors, ROWS_OF_PASS, from, n);
        into += ROWS_OF_PASS;
        factors += ROWS_OF_PASS;
    }
    if (rows == 3)
        NAME(pass)(into, factors, 3, from, n);
    else if (rows == 2)
        NAME(pass)(into, factors, 2, from, n);
    else if (rows == 1)
        NAME(pass)(into, factors, 1, from, n);
}

#undef INLINE
#undef NAME
#undef TARGET
#undef VARIANT
#undef VECTOR
#undef VECTOR_BYTES
#undef FACTOR
#undef SPLIT
#undef FACTOR_OF
#undef SPLIT_OF
#undef PRODUCT
