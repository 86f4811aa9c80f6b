#!/bin/sh
# Runs nvcc. What ptxas says of each kernel goes to a file beside the object, FILE.o.txt, which
# tests/kernels/test_cuda_build.py reads; all else is shown.
for argument; do
    if [ "$previous" = -o ]; then report=$argument.txt; fi
    previous=$argument
done
"$@" >"$report" 2>&1
status=$?
sed '/^ptxas info/d; / bytes stack frame, /d' "$report" >&2
exit $status
