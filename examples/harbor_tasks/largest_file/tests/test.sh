#!/bin/bash
answer=$(tr -d ' \n' < /app/answer.txt)
if [ "$answer" = rivers.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
