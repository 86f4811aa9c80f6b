#!/bin/sh
# Run nvcc, keep ptxas's report of every kernel in FILE.o.txt beside the object, and print all other
# messages.
for argument; do
    if [ "$previous" = -o ]; then report=$argument.txt; fi
    previous=$argument
done
"$@" >"$report" 2>&1
status=$?
sed '/^ptxas info/d; / bytes stack frame, /d' "$report" >&2
exit $status
