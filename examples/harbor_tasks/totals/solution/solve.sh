#!/bin/bash
awk -F, '{sum[$1] += $2} END {for (shop in sum) print shop "," sum[shop]}' /app/sales.csv | sort -t, -k2 -nr > /app/totals.csv
