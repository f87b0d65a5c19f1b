#!/bin/sh
# Installs clang-19 where there is no clang++ from 17 on, apt-get works and we are root. Never fails: the emulator goes
# on with the C++ compiler there is, and tests that need clang's bits are skipped by name.
for version in 19 25 24 23 22 21 20 18 17; do
  command -v "clang++-$version" >/dev/null && exit 0
done
major=$(clang++ -dumpversion 2>/dev/null | cut -d. -f1)
[ "${major:-0}" -ge 17 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  (timeout 60 apt-get update && timeout 180 apt-get install -y --no-install-recommends clang-19) >/dev/null 2>&1 && exit 0
fi
for compiler in clang++ g++ c++; do
  command -v "$compiler" >/dev/null && break
  compiler="no C++ compiler, which fails"
done
echo "clang++ from 17 on is missing and was not installed; the tests of kernels use $compiler."
exit 0
