// What a new compiler would otherwise take from its own machine's libraries, so that the module loads beside
// an older libstdc++ and glibc (manylinux, scripts/check_wheel.py).
#include <new>
#include <sstream>

// C++20 gave these new members, which libstdc++ exports from GCC 11 on: instantiated here instead.
template class std::basic_stringbuf<char>;
template class std::basic_stringstream<char>;
template class std::basic_ostringstream<char>;

// GCC 11 moved this out of operator new's callers.
[[noreturn]] void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// glibc 2.32's hint that no lock is needed; "threads may run" is always right.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
