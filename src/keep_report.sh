#!/bin/sh
# Runs nvcc, and keeps ptxas's report of every kernel beside the object, in FILE.o.txt; other
# messages are shown.
for argument; do
    if [ "$previous" = -o ]; then report=$argument.txt; fi
    previous=$argument
done
"$@" >"$report" 2>&1
status=$?
sed '/^ptxas info/d; / bytes stack frame, /d' "$report" >&2
exit $status
