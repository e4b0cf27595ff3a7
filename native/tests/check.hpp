// The whole test framework: a test is a function registered by name; CHECK prints where it failed and counts.
#pragma once

#include <cstdio>
#include <vector>

namespace tiercel::test {

struct Case {
  const char* name;
  void (*run)();
};
std::vector<Case>& cases();
int& failures();
struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

} // namespace tiercel::test

#define TEST(name)                                                    \
  static void name();                                                 \
  static const tiercel::test::Register register_##name{#name, &name}; \
  static void name()

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      ++tiercel::test::failures();                                              \
    }                                                                           \
  } while (0)
