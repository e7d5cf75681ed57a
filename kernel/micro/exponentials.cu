// The exponential in isolation (paper B.5): what one element costs in instructions, and how long its chain is.
//
// Each kernel scales a score, s·scale + bias, as the attention kernel does, and applies one exponential to it. The
// kernel `identity` stops after the scaling: what another kernel has beyond it is its exponential. `single_…` treats
// one element a thread, `fragment_…` thirty-two, as FlashAttention-4 does between two of its conversions. From sm_100
// on a fragment's elements go in pairs through the packed FP32 instructions, as there.
//
// The integer operations are PTX, so that the compiler gets shl and add.s32 and decides what they become.
//
// Compiled and counted by count.py; no kernel here is ever run.

#define MAGIC 12582912.0f  // 2^23 + 2^22

struct Two {
    float x, y;
};

__device__ __forceinline__ float shifted(float r, int bits, int bias) {
    int n = __float_as_int(r), out;
    if (bias)
        asm("{.reg .s32 t; shl.b32 t, %1, %2; add.s32 %0, t, %3;}" : "=r"(out) : "r"(n), "r"(bits), "r"(bias));
    else
        asm("shl.b32 %0, %1, %2;" : "=r"(out) : "r"(n), "r"(bits));
    return __int_as_float(out);
}

__device__ __forceinline__ float add_down(float a, float b) {
    float out;
    asm("add.rm.ftz.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

#if __CUDA_ARCH__ >= 1000
#define PACKED 1
#define PACKED_2(NAME, PTX)                                                                                       \
    __device__ __forceinline__ Two NAME(Two a, Two b) {                                                           \
        Two out;                                                                                                  \
        asm("{.reg .b64 a, b, c; mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5}; " PTX " c, a, b; mov.b64 {%0, %1}, c;}" \
            : "=f"(out.x), "=f"(out.y)                                                                            \
            : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));                                                            \
        return out;                                                                                               \
    }
PACKED_2(add2, "add.rn.ftz.f32x2")
PACKED_2(add2_down, "add.rm.ftz.f32x2")
PACKED_2(sub2, "sub.rn.ftz.f32x2")
__device__ __forceinline__ Two fma2(Two a, Two b, Two c) {
    Two out;
    asm("{.reg .b64 a, b, c, d; mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5}; mov.b64 c, {%6, %7}; "
        "fma.rn.ftz.f32x2 d, a, b, c; mov.b64 {%0, %1}, d;}"
        : "=f"(out.x), "=f"(out.y)
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y), "f"(c.x), "f"(c.y));
    return out;
}
#else
#define PACKED 0
__device__ __forceinline__ Two add2(Two a, Two b) { return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y)}; }
__device__ __forceinline__ Two add2_down(Two a, Two b) { return {add_down(a.x, b.x), add_down(a.y, b.y)}; }
__device__ __forceinline__ Two sub2(Two a, Two b) { return {__fsub_rn(a.x, b.x), __fsub_rn(a.y, b.y)}; }
__device__ __forceinline__ Two fma2(Two a, Two b, Two c) { return {__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y)}; }
#endif

__device__ __forceinline__ Two both(float c) { return {c, c}; }
__device__ __forceinline__ Two least(Two x, float c) { return {fmaxf(x.x, c), fmaxf(x.y, c)}; }

// 2^k is part of the scale, so an exponential gets t = 2^k·x.

struct Identity {
    static __device__ __forceinline__ Two pair(Two x) { return x; }
    static __device__ __forceinline__ float one(float x) { return x; }
};

struct Ex2 {
    static __device__ __forceinline__ float one(float x) {
        float out;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
        return out;
    }
    static __device__ __forceinline__ Two pair(Two x) { return {one(x.x), one(x.y)}; }
};

// FlashAttention-4's software exponential: floor by an addition that rounds down, a polynomial of the fraction, and
// the integer part added to the exponent.
template <int DEGREE>
struct Poly {
    static __device__ __forceinline__ float coefficient(int i) {
        const float c[3][4] = {{1.0f, 0.922497093677520751953125f, 0.0f, 0.0f},
                               {1.0f, 0.6657850742340087890625f, 0.330107033252716064453125f, 0.0f},
                               {1.0f, 0.695146143436431884765625f, 0.227564394474029541015625f,
                                0.077119089663028717041015625f}};
        return c[DEGREE - 1][i];
    }
    static __device__ __forceinline__ float combined(float rounded, float fraction) {
        int out, n = __float_as_int(rounded), f = __float_as_int(fraction);
        asm("{.reg .s32 t; shl.b32 t, %1, 23; add.s32 %0, t, %2;}" : "=r"(out) : "r"(n), "r"(f));
        return __int_as_float(out);
    }
    static __device__ __forceinline__ float one(float x) {
        x = fmaxf(x, -127.0f);
        float rounded = add_down(x, MAGIC), f = __fsub_rn(x, __fsub_rn(rounded, MAGIC)), p = coefficient(DEGREE);
#pragma unroll
        for (int i = DEGREE - 1; i >= 0; --i) p = __fmaf_rn(p, f, coefficient(i));
        return combined(rounded, p);
    }
    static __device__ __forceinline__ Two pair(Two x) {
        x = least(x, -127.0f);
        Two rounded = add2_down(x, both(MAGIC)), f = sub2(x, sub2(rounded, both(MAGIC))), p = both(coefficient(DEGREE));
#pragma unroll
        for (int i = DEGREE - 1; i >= 0; --i) p = fma2(p, f, both(coefficient(i)));
        return {combined(rounded.x, p.x), combined(rounded.y, p.y)};
    }
};

// S(Q_k) by the paper's bit form, clamped at −126 octaves; or with the exponent's bias folded into the constant, clamped
// at −127, where the weight is exactly 0. The clamp is an immediate operand and costs the same wherever it lies.
template <int K, bool FOLDED>
struct Bits {
    static constexpr float constant = FOLDED ? MAGIC + 127.0f * (1 << K) : MAGIC;
    static constexpr float bottom = (FOLDED ? -127.0f : -126.0f) * (1 << K);
    static constexpr int bias = FOLDED ? 0 : 0x3F800000;
    static __device__ __forceinline__ float one(float t) {
        return shifted(__fadd_rn(fmaxf(t, bottom), constant), 23 - K, bias);
    }
    static __device__ __forceinline__ Two pair(Two t) {
        Two r = add2(least(t, bottom), both(constant));
        return {shifted(r.x, 23 - K, bias), shifted(r.y, 23 - K, bias)};
    }
};

// k = 7 with the constant inside the FMA that scales: only the clamp and the shift are left.
struct Fused {
    static __device__ __forceinline__ float one(float r) { return shifted(fmaxf(r, MAGIC), 16, 0); }
    static __device__ __forceinline__ Two pair(Two r) { return {one(r.x), one(r.y)}; }
};

#define KERNELS(NAME, ...)                                                                                        \
    extern "C" __global__ void single_##NAME(const float* in, float* out, float scale, float bias) {              \
        out[threadIdx.x] = __VA_ARGS__::one(__fmaf_rn(in[threadIdx.x], scale, bias));                             \
    }                                                                                                             \
    extern "C" __global__ void fragment_##NAME(const float4* in, float4* out, float scale, float bias) {          \
        float4 held[8];                                                                                           \
        _Pragma("unroll") for (int i = 0; i < 8; ++i) held[i] = in[threadIdx.x * 8 + i];                          \
        _Pragma("unroll") for (int i = 0; i < 8; ++i) {                                                           \
            Two a = __VA_ARGS__::pair(fma2({held[i].x, held[i].y}, both(scale), both(bias)));                     \
            Two b = __VA_ARGS__::pair(fma2({held[i].z, held[i].w}, both(scale), both(bias)));                     \
            held[i] = {a.x, a.y, b.x, b.y};                                                                       \
        }                                                                                                         \
        _Pragma("unroll") for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = held[i];                         \
    }

using H15 = Bits<1, false>;
using S7 = Bits<7, false>;
using Folded1 = Bits<1, true>;
using Folded7 = Bits<7, true>;
using Poly1 = Poly<1>;
using Poly2 = Poly<2>;
using Poly3 = Poly<3>;

KERNELS(identity, Identity)
KERNELS(ex2, Ex2)
KERNELS(poly1, Poly1)
KERNELS(poly2, Poly2)
KERNELS(poly3, Poly3)
KERNELS(h15, H15)
KERNELS(s7, S7)
KERNELS(folded1, Folded1)
KERNELS(folded7, Folded7)
KERNELS(fused7, Fused)
