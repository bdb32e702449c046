#!/bin/bash
printf 'station,44\nmarket,31\nharbour,21\n' > /tmp/expected
reward=0
diff -u /tmp/expected /app/totals.csv && reward=1
echo $reward > /logs/verifier/reward.txt
