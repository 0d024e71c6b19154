/* The measures of two tensors, the errors of one, and the digest of rows, compiled: what distance.py, error.py and
 * digest.py compute with NumPy.
 *
 * NumPy takes some twenty passes over each chunk, and each call waits for the interpreter; here there is one pass, and no
 * interpreter. Plain C without Python's interface, loaded by ctypes (compiled.py), which holds it against NumPy's answers
 * on a hard input before it is used, so a fault here costs speed and not a verdict.
 *
 * How it is kept exact. Each measure but the two sums is a maximum, a count or a first place, which no order changes.
 * Each sum is taken in LANES partial sums, element i in lane i % LANES, chunk by chunk, whatever the vector width is: so
 * every variant below and any number of threads gets the same bits. Build with -ffp-contract=off, or a variant may fuse
 * a product into a sum; never with -ffast-math, which forgets NaN. -fno-trapping-math and -fno-math-errno change no
 * result: they say that nobody reads the floating-point exception flags, without which no loop here becomes vectors.
 *
 * Loops run over whole blocks: the last one is filled up with zeros on both sides, which differ in nothing.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they lie in memory: a big-endian machine takes the NumPy path"
#endif

#define EXPORT __attribute__((visibility("default")))

/* With PLAIN_ONLY there is but the variant that any processor runs. */
#if defined(__x86_64__) && !defined(PLAIN_ONLY)
#define X86_VARIANTS 1
#else
#define X86_VARIANTS 0
#endif

/* Inlined into one function per variant, and so compiled once for each instruction set. */
#define INLINE static inline __attribute__((always_inline))

enum {
    BLOCK = 512,             /* elements: differences, flips and both sides of a float64, 4 KiB each, stay in a level-1 cache of 32 KiB */
    LANES = 16,              /* four vectors of AVX2: enough additions that do not wait for one another */
    ROW_WORDS = 8192 / 8,    /* of digest.py */
    GROUP_WORDS = 16 * 8,    /* sixteen vectors of 64 bytes, which the adders take together */
    GROUPS_PER_DRAIN = 255,  /* so many ones fit into a byte */
};

/* The keys of sizes: the bits of a float64 that is not negative are in the order of its values, and those of NaN come
 * after infinity, so an integer maximum is one in which NaN is the largest. One key stands for every NaN. */
#define KEY_OF_INFINITY INT64_C(0x7ff0000000000000)
#define KEY_OF_NAN (KEY_OF_INFINITY + 1)

enum kind { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

/* What was seen of two ranges; compiled.py has the same structure. Places are elements from the start of the range, -1
 * where nothing differs. */
struct seen {
    int64_t mismatched, first, last, worst;
    double max_abs, max_rel;
    uint64_t max_ulp;
    int64_t flips[64]; /* by bit of the element, 0 the least significant */
};

/* --- elements ---------------------------------------------------------------------------------------------------- */

/* Bytes of a file's tensor start anywhere; the compiler makes these one load. */
INLINE uint16_t load16(const unsigned char *from, int i) { uint16_t v; memcpy(&v, from + 2 * i, 2); return v; }
INLINE uint32_t load32(const unsigned char *from, int i) { uint32_t v; memcpy(&v, from + 4 * i, 4); return v; }
INLINE uint64_t load64(const unsigned char *from, int i) { uint64_t v; memcpy(&v, from + 8 * i, 8); return v; }

INLINE double of_float64(uint64_t bits) { double v; memcpy(&v, &bits, 8); return v; }
INLINE float of_float32(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
INLINE int64_t key(double size) { int64_t v; memcpy(&v, &size, 8); return v; }

INLINE float of_float16(uint16_t bits)
{
    uint32_t magnitude = bits & 0x7fff, sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t normal = (magnitude << 13) + (112u << 23); /* biases 15 and 127; 10 and 23 bits of mantissa */
    float subnormal = (float)(int32_t)magnitude * 0x1p-24f;
    uint32_t small;
    memcpy(&small, &subnormal, 4);
    normal += magnitude >= 0x7c00 ? 112u << 23 : 0; /* infinity and NaN have the largest exponent of either format */
    return of_float32(sign | (magnitude < 0x400 ? small : normal));
}

INLINE double number(enum kind kind, const unsigned char *from, int i)
{
    if (kind == FLOAT64) return of_float64(load64(from, i));
    if (kind == FLOAT32) return of_float32(load32(from, i));
    if (kind == BFLOAT16) return of_float32((uint32_t)load16(from, i) << 16);
    return of_float16(load16(from, i));
}

INLINE int bytes_of(enum kind kind) { return kind == FLOAT64 ? 8 : kind == FLOAT32 ? 4 : 2; }

/* Integers in the order of the floats, adjacent ones for adjacent floats, both zeros 0; and how far two are apart. */
#define STEPS(width)                                                                                                   \
    INLINE int##width##_t place##width(uint##width##_t bits)                                                           \
    {                                                                                                                  \
        const uint##width##_t magnitude = (uint##width##_t)(bits & (UINT##width##_MAX >> 1));                          \
        return (int##width##_t)(bits >> (width - 1) ? (uint##width##_t)(0 - magnitude) : magnitude);                   \
    }                                                                                                                  \
    INLINE uint##width##_t apart##width(uint##width##_t x, uint##width##_t y)                                          \
    {                                                                                                                  \
        const int##width##_t a = place##width(x), e = place##width(y);                                                 \
        const int##width##_t low = a < e ? a : e, high = a < e ? e : a;                                                \
        return (uint##width##_t)((uint##width##_t)high - (uint##width##_t)low);                                        \
    }                                                                                                                  \
    INLINE uint64_t farthest##width(const unsigned char *a, const unsigned char *e)                                    \
    {                                                                                                                  \
        uint##width##_t most = 0;                                                                                      \
        for (int i = 0; i < BLOCK; i++) {                                                                              \
            const uint##width##_t apart = apart##width(load##width(a, i), load##width(e, i));                          \
            most = apart > most ? apart : most;                                                                        \
        }                                                                                                              \
        return most;                                                                                                   \
    }                                                                                                                  \
    INLINE int differing##width(const unsigned char *flips)                                                            \
    {                                                                                                                  \
        uint##width##_t count = 0; /* of BLOCK at most */                                                              \
        for (int i = 0; i < BLOCK; i++) count = (uint##width##_t)(count + (load##width(flips, i) != 0));               \
        return (int)count;                                                                                             \
    }

STEPS(16)
STEPS(32)
STEPS(64)

INLINE uint64_t apart(enum kind kind, const unsigned char *a, const unsigned char *e, int i)
{
    if (kind == FLOAT64) return apart64(load64(a, i), load64(e, i));
    if (kind == FLOAT32) return apart32(load32(a, i), load32(e, i));
    return apart16(load16(a, i), load16(e, i));
}

INLINE uint64_t farthest(enum kind kind, const unsigned char *a, const unsigned char *e)
{
    return kind == FLOAT64 ? farthest64(a, e) : kind == FLOAT32 ? farthest32(a, e) : farthest16(a, e);
}

/* Count the elements that differ; a complex one, of two parts, counts once. */
INLINE int64_t differing(enum kind kind, int parts, const uint64_t *flips)
{
    const unsigned char *bytes = (const unsigned char *)flips;
    if (parts == 1) return kind == FLOAT64 ? differing64(bytes) : kind == FLOAT32 ? differing32(bytes) : differing16(bytes);
    const int size = 2 * bytes_of(kind);
    int64_t count = 0;
    for (int i = 0; i < BLOCK / 2; i++) {
        unsigned any = 0;
        for (int b = 0; b < size; b++) any |= bytes[i * size + b];
        count += any != 0;
    }
    return count;
}

INLINE int element_differs(int size, const uint64_t *flips, int i)
{
    const unsigned char *bytes = (const unsigned char *)flips + i * size;
    unsigned any = 0;
    for (int b = 0; b < size; b++) any |= bytes[b];
    return any != 0;
}

/* --- flipped bits by position ------------------------------------------------------------------------------------ */

/* Carry-save adders (Harley and Seal; Warren, Hacker's Delight, 2nd ed., section 5-1), as in bitcount.py: eight columns
 * of 64-bit words side by side, a bit of a column's count in each of `ones` to `eights`, and what is carried out of
 * those, sixteen ones each, in bytes. */
struct counter {
    uint64_t ones[8], twos[8], fours[8], eights[8];
    uint64_t sixteens[8][8]; /* by bit of the byte: a count in each byte of the words */
    int groups;
    int64_t counts[64]; /* by bit of a 64-bit word */
};

/* A full adder: sum of three bits of one weight, and what is carried to the next weight. */
#define ADD3(carry, sum, x, y)                                                                                         \
    do {                                                                                                               \
        const uint64_t either = sum ^ (x), second = (y);                                                               \
        carry = (sum & (x)) | (either & second);                                                                       \
        sum = either ^ second;                                                                                         \
    } while (0)

INLINE void add_group(struct counter *c, const uint64_t *restrict w)
{
    for (int j = 0; j < 8; j++) { /* the columns: this is the loop that becomes vectors */
        uint64_t ones = c->ones[j], twos = c->twos[j], fours = c->fours[j], eights = c->eights[j];
        uint64_t two_a, two_b, four_a, four_b, eight_a, eight_b, sixteen;
        ADD3(two_a, ones, w[j], w[j + 8]);
        ADD3(two_b, ones, w[j + 16], w[j + 24]);
        ADD3(four_a, twos, two_a, two_b);
        ADD3(two_a, ones, w[j + 32], w[j + 40]);
        ADD3(two_b, ones, w[j + 48], w[j + 56]);
        ADD3(four_b, twos, two_a, two_b);
        ADD3(eight_a, fours, four_a, four_b);
        ADD3(two_a, ones, w[j + 64], w[j + 72]);
        ADD3(two_b, ones, w[j + 80], w[j + 88]);
        ADD3(four_a, twos, two_a, two_b);
        ADD3(two_a, ones, w[j + 96], w[j + 104]);
        ADD3(two_b, ones, w[j + 112], w[j + 120]);
        ADD3(four_b, twos, two_a, two_b);
        ADD3(eight_b, fours, four_a, four_b);
        ADD3(sixteen, eights, eight_a, eight_b);
        c->ones[j] = ones, c->twos[j] = twos, c->fours[j] = fours, c->eights[j] = eights;
        for (int bit = 0; bit < 8; bit++) c->sixteens[bit][j] += (sixteen >> bit) & UINT64_C(0x0101010101010101);
    }
}

static void drain_sixteens(struct counter *c)
{
    for (int bit = 0; bit < 8; bit++)
        for (int j = 0; j < 8; j++)
            for (int byte = 0; byte < 8; byte++)
                c->counts[8 * byte + bit] += 16 * (int64_t)((c->sixteens[bit][j] >> (8 * byte)) & 0xff);
    memset(c->sixteens, 0, sizeof c->sixteens);
    c->groups = 0;
}

static void drain(struct counter *c, int width, int64_t *flips)
{
    drain_sixteens(c);
    for (int j = 0; j < 8; j++)
        for (int bit = 0; bit < 64; bit++)
            c->counts[bit] += (int64_t)((c->ones[j] >> bit & 1) + 2 * (c->twos[j] >> bit & 1) +
                                        4 * (c->fours[j] >> bit & 1) + 8 * (c->eights[j] >> bit & 1));
    for (int bit = 0; bit < 64; bit++) flips[bit % width] += c->counts[bit];
}

/* --- the measures ------------------------------------------------------------------------------------------------ */

/* The largest difference and the largest relative one of a block, by key. */
struct largest {
    int64_t off, relative;
};

/* |a - e| of each element. An infinity or NaN is only recognised here, by the largest key. */
INLINE struct largest differences(enum kind kind, const unsigned char *a, const unsigned char *e, double *restrict off)
{
    int64_t most = 0, most_relative = 0;
    for (int i = 0; i < BLOCK; i++) {
        const double q = number(kind, e, i), d = fabs(number(kind, a, i) - q);
        off[i] = d;
        double r = d / fabs(q);
        r = d == 0 ? 0.0 : r; /* off by nothing, of zero too */
        most = key(d) > most ? key(d) : most;
        most_relative = key(r) > most_relative ? key(r) : most_relative;
    }
    return (struct largest){.off = most, .relative = most_relative};
}

/* The same where one of them is not finite: equal infinities and paired NaNs differ in bits alone, and what is infinitely
 * far is so relative to anything. */
INLINE struct largest settled(enum kind kind, const unsigned char *a, const unsigned char *e, double *off)
{
    struct largest most = {0, 0};
    for (int i = 0; i < BLOCK; i++) {
        const double p = number(kind, a, i), q = number(kind, e, i);
        const int paired = p == q || (isnan(p) && isnan(q));
        const double d = off[i] = paired ? 0.0 : fabs(p - q);
        const double r = d == 0 || isinf(d) ? d : d / fabs(q);
        const int64_t size = isnan(d) ? KEY_OF_NAN : key(d), relative = isnan(r) ? KEY_OF_NAN : key(r);
        most.off = size > most.off ? size : most.off;
        most.relative = relative > most.relative ? relative : most.relative;
    }
    return most;
}

/* How far the same are apart in steps at most; NaN has no place in the order, and a pair of them is not apart. */
INLINE uint64_t settled_steps(enum kind kind, const unsigned char *a, const unsigned char *e)
{
    uint64_t most = 0;
    for (int i = 0; i < BLOCK; i++)
        if (!isnan(number(kind, a, i)) && !isnan(number(kind, e, i)) && apart(kind, a, e, i) > most)
            most = apart(kind, a, e, i);
    return most;
}

/* Four lanes, as wide as AVX2. As a type, and each by its name: a compiler keeps an array of sums in memory, and then each
 * addition waits for the store of the last (seen: half the speed of the whole). */
typedef double four __attribute__((vector_size(32)));

INLINE four load4(const double *from) { four v; memcpy(&v, from, sizeof v); return v; }
INLINE void store4(double *to, four v) { memcpy(to, &v, sizeof v); }

INLINE void add_up(const double *restrict off, double *restrict sums, double *restrict squares)
{
    four s0 = load4(sums), s1 = load4(sums + 4), s2 = load4(sums + 8), s3 = load4(sums + 12);
    four t0 = load4(squares), t1 = load4(squares + 4), t2 = load4(squares + 8), t3 = load4(squares + 12);
    for (int i = 0; i < BLOCK; i += LANES) {
        const four d0 = load4(off + i), d1 = load4(off + i + 4), d2 = load4(off + i + 8), d3 = load4(off + i + 12);
        s0 += d0, s1 += d1, s2 += d2, s3 += d3;
        t0 += d0 * d0, t1 += d1 * d1, t2 += d2 * d2, t3 += d3 * d3;
    }
    store4(sums, s0), store4(sums + 4, s1), store4(sums + 8, s2), store4(sums + 12, s3);
    store4(squares, t0), store4(squares + 4, t1), store4(squares + 8, t2), store4(squares + 12, t3);
}

static double folded(double *lanes)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

static double of_key(int64_t k) { return k >= KEY_OF_NAN ? (double)NAN : of_float64((uint64_t)k); }

INLINE void measure_range(enum kind kind, int parts, const unsigned char *a, const unsigned char *e, int64_t n,
                          int64_t chunk, double *chunk_sums, double *chunk_squares, struct seen *out)
{
    const int size = bytes_of(kind), words = BLOCK * size / 8;
    /* zeros for what the last block lacks */
    unsigned char last_a[BLOCK * 8], last_e[BLOCK * 8];
    double off[BLOCK], sums[LANES], squares[LANES];
    uint64_t flips[BLOCK];
    struct counter counter;
    int64_t worst = -1, worst_key = -1, relative = 0;
    memset(out, 0, sizeof *out);
    memset(&counter, 0, sizeof counter);
    out->first = out->last = -1;
    for (int64_t start = 0; start < n; start += chunk, chunk_sums++, chunk_squares++) {
        const int64_t stop = n - start < chunk ? n : start + chunk;
        memset(sums, 0, sizeof sums);
        memset(squares, 0, sizeof squares);
        for (int64_t block = start; block < stop; block += BLOCK) {
            const unsigned char *x = a + block * size, *y = e + block * size;
            if (stop - block < BLOCK) {
                const size_t held = (size_t)(stop - block) * (size_t)size;
                memset(last_a, 0, sizeof last_a);
                memset(last_e, 0, sizeof last_e);
                memcpy(last_a, x, held);
                memcpy(last_e, y, held);
                x = last_a, y = last_e;
            }
            uint64_t any = 0;
            for (int i = 0; i < words; i++) {
                flips[i] = load64(x, i) ^ load64(y, i);
                any |= flips[i];
            }
            if (!any) continue;
            out->mismatched += differing(kind, parts, flips);
            for (int i = 0; i < words; i += GROUP_WORDS) {
                add_group(&counter, flips + i);
                if (++counter.groups == GROUPS_PER_DRAIN) drain_sixteens(&counter);
            }
            int first = 0, last = BLOCK - 1;
            if (out->first < 0) {
                while (!element_differs(size, flips, first)) first++;
                out->first = worst = block + first;
                worst_key = 0;
            }
            while (!element_differs(size, flips, last)) last--;
            out->last = block + last;
            struct largest most = differences(kind, x, y, off);
            uint64_t steps;
            if (most.off < KEY_OF_INFINITY) {
                steps = farthest(kind, x, y);
            } else {
                most = settled(kind, x, y, off);
                steps = settled_steps(kind, x, y);
            }
            out->max_ulp = steps > out->max_ulp ? steps : out->max_ulp;
            relative = most.relative > relative ? most.relative : relative;
            if (most.off > worst_key) {
                int i = 0;
                while ((isnan(off[i]) ? KEY_OF_NAN : key(off[i])) != most.off) i++;
                worst = block + i, worst_key = most.off;
            }
            add_up(off, sums, squares);
        }
        *chunk_sums = folded(sums);
        *chunk_squares = folded(squares);
    }
    drain(&counter, 8 * size, out->flips);
    out->worst = worst;
    out->max_abs = of_key(worst_key < 0 ? 0 : worst_key);
    out->max_rel = of_key(relative);
}

#define MEASURE(name, ...)                                                                                             \
    __VA_ARGS__ static void name(int kind, int parts, const unsigned char *a, const unsigned char *e, int64_t n,       \
                                 int64_t chunk, double *sums, double *squares, struct seen *out)                       \
    {                                                                                                                  \
        if (kind == FLOAT32) measure_range(FLOAT32, parts, a, e, n, chunk, sums, squares, out);                        \
        else if (kind == BFLOAT16) measure_range(BFLOAT16, parts, a, e, n, chunk, sums, squares, out);                 \
        else if (kind == FLOAT16) measure_range(FLOAT16, parts, a, e, n, chunk, sums, squares, out);                   \
        else measure_range(FLOAT64, parts, a, e, n, chunk, sums, squares, out);                                        \
    }

MEASURE(measure_plain)
#if X86_VARIANTS
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl")))
MEASURE(measure_avx2, AVX2)
MEASURE(measure_avx512, AVX512)
#endif

/* --- errors against exact values --------------------------------------------------------------------------------- */

/* What is allowed of an element: nothing is known, a value each, a LoRA's bound, or a user's tolerance; see `Allowance`
 * and `UserAllowance` in bound.py. */
enum allowance { NONE, GIVEN, DERIVED, USER };

/* A tensor and its exact values: `value`, float64, with `base` added where there is one, a tensor of the same dtype.
 * `size` holds the allowed errors (GIVEN) or the sums of magnitudes of the products (DERIVED). */
struct computed {
    const unsigned char *actual, *value, *size, *base;
    int allowance;
    double product_or_rtol, weight, floor_or_atol;
};

/* What was seen of a tensor so far; compiled.py has the same structure. `worst` is the first element of the largest ratio,
 * or of the largest error where nothing is known to be allowed; -1 where all errors are 0. */
struct errors {
    int64_t mismatched, worst;
    double max_abs, max_rel, ratio, magnitude, worst_exact;
    uint64_t max_ulp;
};

/* The float32 next to a value in float16: ties go to the even one. Infinity stays, NaN does not come here. */
INLINE uint16_t to_float16(uint32_t bits)
{
    const uint32_t x = bits & 0x7fffffff;
    uint32_t normal = (x - (112u << 23) + 0xfff + (x >> 13 & 1)) >> 13; /* biases 15 and 127; 10 and 23 bits of mantissa */
    normal = normal > 0x7c00 ? 0x7c00 : normal; /* the exponent of infinity and beyond */
    const float shifted = of_float32(x) + 0.5f; /* of 0.5 the last bit of the mantissa is that of a subnormal */
    uint32_t small;
    memcpy(&small, &shifted, 4);
    return (uint16_t)(bits >> 16 & 0x8000) | (uint16_t)(x < 113u << 23 ? small - (126u << 23) : normal);
}

/* Round a block, as torch does: to the narrow formats by way of float32. Return how many elements are not what was
 * computed. */
INLINE int64_t round_to(enum kind kind, const double *restrict exact, const unsigned char *actual,
                        unsigned char *restrict to)
{
    if (kind == FLOAT64) {
        int64_t count = 0;
        memcpy(to, exact, BLOCK * 8);
        for (int i = 0; i < BLOCK; i++) count += load64(to, i) != load64(actual, i);
        return count;
    }
    if (kind == FLOAT32) {
        uint32_t count = 0;
        for (int i = 0; i < BLOCK; i++) {
            const float narrow = (float)exact[i];
            memcpy(to + 4 * i, &narrow, 4);
            count += load32(to, i) != load32(actual, i);
        }
        return count;
    }
    uint16_t count = 0; /* of BLOCK at most */
    for (int i = 0; i < BLOCK; i++) {
        const float narrow = (float)exact[i];
        uint32_t bits;
        memcpy(&bits, &narrow, 4);
        const uint16_t half = kind == BFLOAT16 ? (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : to_float16(bits);
        memcpy(to + 2 * i, &half, 2);
        count = (uint16_t)(count + (half != load16(actual, i)));
    }
    return count;
}

/* Whether an error over `by` may exceed the largest quotient so far. If d / by > best, then d > best * by, and since d is
 * a float64, d is no smaller than that product rounded: a multiplication tells, and few blocks divide. NaN divides. */
INLINE int64_t may_exceed(double off, double by, double best) { return (off > 0) & !(off < best * fabs(by)); }

/* The keys of the largest error and of the largest exact value of a block, and whether it may hold the largest relative
 * error so far. */
struct sizes {
    int64_t off, exact, exceeds;
};

INLINE struct sizes errors_of(enum kind kind, int has_base, const struct computed *of, double max_rel,
                              double *restrict exact, double *restrict off)
{
    struct sizes seen = {0, 0, 0};
    for (int i = 0; i < BLOCK; i++) {
        double e = of_float64(load64(of->value, i));
        if (has_base) e += number(kind, of->base, i);
        const double d = fabs(number(kind, of->actual, i) - e);
        exact[i] = e, off[i] = d;
        seen.off = key(d) > seen.off ? key(d) : seen.off;
        seen.exact = key(fabs(e)) > seen.exact ? key(fabs(e)) : seen.exact;
        seen.exceeds |= may_exceed(d, e, max_rel);
    }
    return seen;
}

/* What is allowed of each element, and whether the block may hold the largest ratio so far. The order of operations is
 * that of chunks.py and bound.py. */
#define ALLOWED(expression)                                                                                            \
    for (int i = 0; i < BLOCK; i++) {                                                                                  \
        const double here = (expression);                                                                              \
        allowed[i] = here;                                                                                             \
        exceeds |= may_exceed(off[i], here, ratio);                                                                    \
    }

INLINE int64_t allowed_of(enum kind kind, int has_base, const struct computed *of, double ratio,
                          const double *restrict exact, const double *restrict off, double *restrict allowed)
{
    const double p = of->product_or_rtol, w = of->weight, f = of->floor_or_atol;
    int64_t exceeds = 0;
    if (of->allowance == USER) ALLOWED(fabs(exact[i]) * p + f)
    else if (of->allowance == GIVEN) ALLOWED(of_float64(load64(of->size, i)))
    else if (has_base) ALLOWED(of_float64(load64(of->size, i)) * p + fabs(number(kind, of->base, i)) * w + f)
    else ALLOWED(of_float64(load64(of->size, i)) * p + f)
    return exceeds;
}

/* The key of the largest error over `by`; 0 / 0 is 0: no error. */
INLINE int64_t largest_quotient(const double *restrict off, const double *restrict by, double *restrict quotient)
{
    int64_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        double q = off[i] / fabs(by[i]);
        q = fabs(off[i] == 0 ? 0.0 : q);
        quotient[i] = q;
        most = key(q) > most ? key(q) : most;
    }
    return most;
}

/* Add a block; return 0 where a value or an error is not finite, or a quotient is NaN: NumPy settles those. */
INLINE int add_block(enum kind kind, int has_base, const struct computed *of, int64_t start, struct errors *seen,
                     double *sums, double *squares)
{
    double exact[BLOCK], off[BLOCK], by[BLOCK], quotient[BLOCK];
    unsigned char rounded[BLOCK * 8];
    const struct sizes most = errors_of(kind, has_base, of, seen->max_rel, exact, off);
    if (most.off >= KEY_OF_INFINITY || most.exact >= KEY_OF_INFINITY) return 0;
    seen->magnitude = of_key(most.exact) > seen->magnitude ? of_key(most.exact) : seen->magnitude;
    const double *badness = NULL;
    int64_t score = 0;
    if (of->allowance != NONE) {
        if (allowed_of(kind, has_base, of, seen->ratio, exact, off, by)) {
            score = largest_quotient(off, by, quotient);
            if (score > KEY_OF_INFINITY) return 0;
            if (of_key(score) > seen->ratio) badness = quotient, seen->ratio = of_key(score);
        }
    } else if (of_key(most.off) > seen->max_abs) {
        badness = off, score = most.off;
    }
    if (badness) {
        int i = 0;
        while (key(badness[i]) != score) i++;
        seen->worst = start + i, seen->worst_exact = exact[i];
    }
    seen->max_abs = of_key(most.off) > seen->max_abs ? of_key(most.off) : seen->max_abs;
    if (most.exceeds) {
        const double relative = of_key(largest_quotient(off, exact, quotient));
        seen->max_rel = relative > seen->max_rel ? relative : seen->max_rel;
    }
    const int64_t mismatched = round_to(kind, exact, of->actual, rounded);
    if (mismatched) {
        const uint64_t steps = farthest(kind, of->actual, rounded);
        seen->mismatched += mismatched;
        seen->max_ulp = steps > seen->max_ulp ? steps : seen->max_ulp;
    }
    add_up(off, sums, squares);
    return 1;
}

/* Zeros for what the last block lacks. */
struct filled {
    unsigned char actual[BLOCK * 8], value[BLOCK * 8], size[BLOCK * 8], base[BLOCK * 8];
};

INLINE const unsigned char *fill(unsigned char *to, const unsigned char *from, int64_t held)
{
    if (!from) return NULL;
    memset(to, 0, BLOCK * 8);
    memcpy(to, from, (size_t)held);
    return to;
}

INLINE int64_t errors_range(enum kind kind, int has_base, const struct computed *whole, int64_t start, int64_t n,
                            int64_t chunk, double *chunk_sums, double *chunk_squares, unsigned char *left_out,
                            struct errors *seen)
{
    const int width = bytes_of(kind);
    int64_t unsettled = 0;
    for (int64_t first = 0; first < n; first += chunk, chunk_sums++, chunk_squares++, left_out++) {
        const int64_t stop = n - first < chunk ? n : first + chunk;
        double sums[LANES] = {0}, squares[LANES] = {0};
        struct errors here = *seen;
        int settled = 1;
        for (int64_t block = first; settled && block < stop; block += BLOCK) {
            struct computed part = *whole;
            struct filled last;
            part.actual += block * width, part.value += block * 8;
            if (part.size) part.size += block * 8;
            if (has_base) part.base += block * width;
            if (stop - block < BLOCK) {
                const int64_t held = stop - block;
                part.actual = fill(last.actual, part.actual, held * width);
                part.value = fill(last.value, part.value, held * 8);
                part.size = fill(last.size, part.size, held * 8);
                part.base = fill(last.base, part.base, held * width);
            }
            settled = add_block(kind, has_base, &part, start + block, &here, sums, squares);
        }
        if (settled) *seen = here;
        unsettled += *left_out = !settled;
        *chunk_sums = settled ? folded(sums) : 0;
        *chunk_squares = settled ? folded(squares) : 0;
    }
    return unsettled;
}

#define ERRORS_OF(kind)                                                                                                \
    return of->base ? errors_range(kind, 1, of, start, n, chunk, sums, squares, left_out, seen)                        \
                    : errors_range(kind, 0, of, start, n, chunk, sums, squares, left_out, seen)

#define ERRORS(name, ...)                                                                                              \
    __VA_ARGS__ static int64_t name(int kind, const struct computed *of, int64_t start, int64_t n, int64_t chunk,      \
                                    double *sums, double *squares, unsigned char *left_out, struct errors *seen)       \
    {                                                                                                                  \
        if (kind == FLOAT32) ERRORS_OF(FLOAT32);                                                                       \
        if (kind == BFLOAT16) ERRORS_OF(BFLOAT16);                                                                     \
        if (kind == FLOAT16) ERRORS_OF(FLOAT16);                                                                       \
        ERRORS_OF(FLOAT64);                                                                                            \
    }

ERRORS(errors_plain)
#if X86_VARIANTS
ERRORS(errors_avx2, AVX2)
ERRORS(errors_avx512, AVX512)
#endif

/* --- the digest of rows ------------------------------------------------------------------------------------------ */

/* The sum of w_i X_i + v_i (X_i >> 32) over the words of each row, modulo 2**64; digest.py says what it is good for. A sum of
 * integers that wrap has no order, so the compiler may take it in vectors as it likes. */
INLINE void digest_rows(const unsigned char *data, int64_t rows, const uint64_t *restrict w, const uint64_t *restrict v,
                        uint64_t *restrict out)
{
    for (int64_t r = 0; r < rows; r++, data += ROW_WORDS * 8) {
        uint64_t sum = 0;
        for (int i = 0; i < ROW_WORDS; i++) {
            const uint64_t x = load64(data, i), sign = x >> 63 ? UINT64_C(0xffffffff00000000) : 0;
            sum += w[i] * x + v[i] * (sign | x >> 32);
        }
        out[r] = sum;
    }
}

#define DIGEST(name, ...)                                                                                              \
    __VA_ARGS__ static void name(const unsigned char *data, int64_t rows, const uint64_t *w, const uint64_t *v,        \
                                 uint64_t *out)                                                                        \
    {                                                                                                                  \
        digest_rows(data, rows, w, v, out);                                                                            \
    }

DIGEST(digest_plain)
#if X86_VARIANTS
DIGEST(digest_avx2, AVX2)
DIGEST(digest_avx512, AVX512)
#endif

/* --- what compiled.py calls -------------------------------------------------------------------------------------- */

/* Variants by number: 0 for any processor of the architecture, 1 for AVX2, 2 for AVX-512. */
EXPORT int consistency_variants(void)
{
#if X86_VARIANTS
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return 1;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 3;
    return 2;
#else
    return 1;
#endif
}

#ifndef SOURCE
#define SOURCE 0
#endif
/* A checksum of this file as it was compiled. */
EXPORT uint32_t consistency_source(void) { return SOURCE; }

/* Measure n elements; `chunk`, a multiple of BLOCK, is how many share a sum: there is one in `sums` and `squares` for each. */
EXPORT void consistency_measure(int variant, int kind, int parts, const unsigned char *a, const unsigned char *e,
                                int64_t n, int64_t chunk, double *sums, double *squares, struct seen *out)
{
#if X86_VARIANTS
    if (variant == 2) { measure_avx512(kind, parts, a, e, n, chunk, sums, squares, out); return; }
    if (variant == 1) { measure_avx2(kind, parts, a, e, n, chunk, sums, squares, out); return; }
#endif
    (void)variant;
    measure_plain(kind, parts, a, e, n, chunk, sums, squares, out);
}

/* Add n elements to what was seen, of which the first is number `start`; `chunk`, a multiple of BLOCK, is how many share a
 * sum and an element of `left_out`: 1 where something is not finite, and nothing was added. Return how many were left
 * out. */
EXPORT int64_t consistency_errors(int variant, int kind, const struct computed *of, int64_t start, int64_t n,
                                  int64_t chunk, double *sums, double *squares, unsigned char *left_out,
                                  struct errors *seen)
{
#if X86_VARIANTS
    if (variant == 2) return errors_avx512(kind, of, start, n, chunk, sums, squares, left_out, seen);
    if (variant == 1) return errors_avx2(kind, of, start, n, chunk, sums, squares, left_out, seen);
#endif
    (void)variant;
    return errors_plain(kind, of, start, n, chunk, sums, squares, left_out, seen);
}

/* Digest whole rows. */
EXPORT void consistency_digest(int variant, const unsigned char *data, int64_t rows, const uint64_t *w,
                               const uint64_t *v, uint64_t *out)
{
#if X86_VARIANTS
    if (variant == 2) digest_avx512(data, rows, w, v, out);
    if (variant == 1) digest_avx2(data, rows, w, v, out);
    if (variant > 0) return;
#endif
    (void)variant;
    digest_plain(data, rows, w, v, out);
}
