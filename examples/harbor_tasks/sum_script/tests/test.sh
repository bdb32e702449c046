#!/bin/bash
# Each file of numbers that is summed correctly is worth a third.
passed=0
for numbers in '1 2 3' '10 -4' '5  7'; do
    tr ' ' '\n' <<< "$numbers" > /tmp/numbers
    expected=$(awk '{sum += $1} END {print sum + 0}' /tmp/numbers)
    [ "$(timeout 5 bash /app/sum.sh /tmp/numbers)" = "$expected" ] && passed=$((passed + 1))
done
awk -v passed=$passed 'BEGIN {printf "{\"reward\": %.3f, \"passed\": %d}\n", passed / 3, passed}' > /logs/verifier/reward.json
