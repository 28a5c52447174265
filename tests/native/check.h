// Checks for the native tests: a failure prints file, line and values, is counted, and does not stop the test. `return
// check::report();` ends main().
#pragma once

#include <atomic>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <source_location>
#include <sstream>
#include <string>

namespace check {

inline std::atomic<int> failures{0};

inline void fail(const std::string& what, const std::source_location& where) {
  // A broken loop fails a million times; the first lines suffice.
  if (++failures <= 20) {
    std::ostringstream line;
    line << where.file_name() << ":" << where.line() << ": " << what << "\n";
    std::cerr << line.str();
  }
}

template <class T>
std::string text(const T& value) {
  std::ostringstream out;
  if constexpr (std::integral<T> && sizeof(T) == 1) {
    out << static_cast<int>(value);
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else {
    out << "(" << sizeof(T) << " bytes)";
  }
  return out.str();
}

// The context adds what the expression lacks: the dtype, the size, the offset of a loop.
inline void that(bool holds, const char* expression, const std::string& context = "",
                 const std::source_location& where = std::source_location::current()) {
  if (!holds) {
    std::string message(expression);  // in one expression, GCC 12 warns with sanitizers of memory that is not copied
    message += " is false";
    if (!context.empty()) message += " for " + context;
    fail(message, where);
  }
}

template <class A, class B>
void equal(const A& got, const B& expected, const std::string& context = "",
           const std::source_location& where = std::source_location::current()) {
  if (!(got == expected)) {
    fail("got " + text(got) + ", expected " + text(expected) + (context.empty() ? "" : " for " + context), where);
  }
}

// Returns the thrown exception, to check its fields.
template <class E, class F>
E thrown(F&& body, const std::source_location& where = std::source_location::current()) {
  try {
    body();
  } catch (const E& error) {
    return error;
  } catch (const std::exception& error) {
    fail(std::string("another exception was thrown: ") + error.what(), where);
    std::exit(1);
  }
  fail("nothing was thrown", where);
  std::exit(1);
}

inline int report() {
  if (failures > 0) {
    std::cerr << failures << " checks failed\n";
    return 1;
  }
  return 0;
}

}  // namespace check

#define CHECK(expression) ::check::that(static_cast<bool>(expression), #expression)
#define CHECK_EQ(got, expected) ::check::equal((got), (expected))
#define CHECK_THROWS(type, expression) ::check::thrown<type>([&] { (void)(expression); })
