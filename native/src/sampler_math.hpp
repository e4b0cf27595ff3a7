// The arithmetic that decides which token wins: the same IEEE double operations, in the same order, as
// src/tiercel/sampling/arithmetic.py. Included by baseline code only (sampler*.cpp), so inline functions are safe here.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tiercel::sampler_math {

inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr double kLn2High = 0.6931471805601177; // 40 fractional bits: products with small integers are exact
inline constexpr double kLn2Low = -1.7239444525614835e-13;
inline constexpr double kRound = 6755399441055744.0; // 1.5 * 2^52
inline constexpr double kTwo52 = 4503599627370496.0;
inline constexpr double kWeightOne = 17592186044416.0; // 2^44
inline constexpr double kExpFloor = -40.0;

// exp(x) for kExpFloor <= x <= 0, in units of 2^-44, rounded to an integer. Vectorises: no branch, no call.
inline uint64_t weight_above_floor(double x) {
  const double t = x * kLog2E + kRound;
  const double n = t - kRound;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double p = 1.0 / 39916800.0; // 1 / 11!
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  // The low bits of t hold n; moved to the exponent they are 2^n.
  const uint64_t exponent = std::bit_cast<uint64_t>(t) - std::bit_cast<uint64_t>(kRound) + 1023;
  const double scaled = p * std::bit_cast<double>(exponent << 52) * kWeightOne;
  return std::bit_cast<uint64_t>(scaled + kTwo52) - std::bit_cast<uint64_t>(kTwo52);
}

inline double with_floor(double x) { return x > kExpFloor ? x : kExpFloor; }

// exp(x) for x <= 0, in units of 2^-44; below kExpFloor it is 0 anyway.
inline uint64_t weight(double x) { return weight_above_floor(with_floor(x)); }

// weight(x[i] - largest) of n <= 64 values. Two loops, as one would be compiled to a branch around the arithmetic.
inline void weights(const float* x, int64_t n, double largest, uint64_t* out) {
  double d[64];
  for (int64_t i = 0; i < n; ++i) d[i] = with_floor(static_cast<double>(x[i]) - largest);
  for (int64_t i = 0; i < n; ++i) out[i] = weight_above_floor(d[i]);
}

// Natural logarithm of positive finite x.
inline double log(double x) {
  int k = 0;
  double m = std::frexp(x, &k);
  if (m < 0.7071067811865476) {
    m *= 2.0;
    k -= 1;
  }
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double q = 1.0 / 21.0;
  for (int i = 9; i >= 1; --i) q = q * z + 1.0 / (2 * i + 1);
  return k * kLn2High + (2.0 * s + (2.0 * s * (z * q) + k * kLn2Low));
}

inline double log_of_weight(uint64_t total) { return log(static_cast<double>(total) * (1.0 / kWeightOne)); }

} // namespace tiercel::sampler_math
