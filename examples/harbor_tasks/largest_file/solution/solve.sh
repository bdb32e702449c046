#!/bin/bash
cd /app/notes
wc -l -- *.txt | grep -v total | sort -n | tail -1 | awk '{print $2}' > /app/answer.txt
