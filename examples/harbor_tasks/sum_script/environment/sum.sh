#!/bin/bash
total=0
while read -r number; do
    total=$number
done < "$1"
echo "$total"
