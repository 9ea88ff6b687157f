/* The six kernels for one dtype and one instruction set; kernels_target.h includes this, with
 *   DTYPE         the suffix of their names
 *   VECTOR        a register of accumulators; SCALAR is the type of one
 *   WIRE_VECTOR   as many elements as they stand on the wire
 *   FROM_WIRE(v), TO_WIRE(v)
 *
 * A kernel is one loop over a register's worth of elements. The last of them may be partial: it is
 * loaded and stored through a buffer, so that it is computed by the same code as the others.
 */
#define K(name)   JOIN3(name, DTYPE, VARIANT)
#define LANES     (sizeof(VECTOR) / sizeof(SCALAR))
#define ACC_STEP  sizeof(SCALAR)
#define WIRE_STEP (sizeof(WIRE_VECTOR) / LANES)

/* The number of elements in the register that begins at i. */
INLINE size_t K(lanes)(size_t n, size_t i) {
    return n - i < LANES ? n - i : LANES;
}

INLINE VECTOR K(load_acc)(const char *p, size_t lanes) {
    VECTOR v;
    if (lanes == LANES) {
        memcpy(&v, p, sizeof v);
        return v;
    }
    v = (VECTOR){0};
    memcpy(&v, p, lanes * ACC_STEP);
    return v;
}

INLINE VECTOR K(load)(const char *p, size_t lanes) {
    WIRE_VECTOR v;
    if (lanes == LANES) {
        memcpy(&v, p, sizeof v);
        return FROM_WIRE(v);
    }
    v = (WIRE_VECTOR){0};
    memcpy(&v, p, lanes * WIRE_STEP);
    return FROM_WIRE(v);
}

INLINE void K(store_acc)(char *p, VECTOR v, size_t lanes) {
    if (lanes == LANES)
        memcpy(p, &v, sizeof v);
    else
        memcpy(p, &v, lanes * ACC_STEP);
}

INLINE void K(store)(char *p, VECTOR v, size_t lanes) {
    WIRE_VECTOR out = TO_WIRE(v);
    if (lanes == LANES)
        memcpy(p, &out, sizeof out);
    else
        memcpy(p, &out, lanes * WIRE_STEP);
}

TARGET static void K(first)(void *acc, const void *own, const void *x, size_t n) {
    char *a = acc;
    const char *o = own, *p = x;
    for (size_t i = 0; i < n; i += LANES) {
        size_t lanes = K(lanes)(n, i);
        VECTOR sum = K(load)(p + i * WIRE_STEP, lanes);
        if (o)
            sum = K(load)(o + i * WIRE_STEP, lanes) + sum;
        K(store_acc)(a + i * ACC_STEP, sum, lanes);
    }
}

TARGET static void K(add)(void *acc, const void *x, size_t n) {
    char *a = acc;
    const char *p = x;
    for (size_t i = 0; i < n; i += LANES) {
        size_t lanes = K(lanes)(n, i);
        VECTOR sum = K(load_acc)(a + i * ACC_STEP, lanes) + K(load)(p + i * WIRE_STEP, lanes);
        K(store_acc)(a + i * ACC_STEP, sum, lanes);
    }
}

TARGET static void K(first_weighted)(void *acc, const void *own, const void *x, double factor,
                                     size_t n) {
    char *a = acc;
    const char *o = own, *p = x;
    SCALAR f = (SCALAR)factor;
    for (size_t i = 0; i < n; i += LANES) {
        size_t lanes = K(lanes)(n, i);
        VECTOR sum = K(load)(p + i * WIRE_STEP, lanes) * f;
        if (o)
            sum = K(load)(o + i * WIRE_STEP, lanes) + sum;
        K(store_acc)(a + i * ACC_STEP, sum, lanes);
    }
}

TARGET static void K(add_weighted)(void *acc, const void *x, double factor, size_t n) {
    char *a = acc;
    const char *p = x;
    SCALAR f = (SCALAR)factor;
    for (size_t i = 0; i < n; i += LANES) {
        size_t lanes = K(lanes)(n, i);
        VECTOR part = K(load)(p + i * WIRE_STEP, lanes) * f;
        K(store_acc)(a + i * ACC_STEP, K(load_acc)(a + i * ACC_STEP, lanes) + part, lanes);
    }
}

TARGET static void K(finish)(void *out, const void *acc, size_t n, double factor) {
    char *to = out;
    const char *a = acc;
    SCALAR f = (SCALAR)factor;
    for (size_t i = 0; i < n; i += LANES) {
        size_t lanes = K(lanes)(n, i);
        K(store)(to + i * WIRE_STEP, K(load_acc)(a + i * ACC_STEP, lanes) * f, lanes);
    }
}

TARGET static void K(blend)(void *out, const void *own, double own_factor, const void *acc,
                            double acc_factor, size_t n) {
    char *to = out;
    const char *o = own, *a = acc;
    SCALAR of = (SCALAR)own_factor, af = (SCALAR)acc_factor;
    for (size_t i = 0; i < n; i += LANES) {
        size_t lanes = K(lanes)(n, i);
        VECTOR sum = K(load)(o + i * WIRE_STEP, lanes) * of;
        if (a)
            sum = sum + K(load_acc)(a + i * ACC_STEP, lanes) * af;
        K(store)(to + i * WIRE_STEP, sum, lanes);
    }
}

static const lc_kernels K(kernels) = {WIRE_STEP,         ACC_STEP,        K(first),  K(add),
                                      K(first_weighted), K(add_weighted), K(finish), K(blend)};

#undef K
#undef LANES
#undef ACC_STEP
#undef WIRE_STEP
#undef DTYPE
#undef VECTOR
#undef SCALAR
#undef WIRE_VECTOR
#undef FROM_WIRE
#undef TO_WIRE
