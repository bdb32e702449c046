"""Small games, written as `docs/your_own_agent.md` says. Defaults were chosen on nim and the hidden word only.

python -m benchmarks tasks --task benchmarks.games.nim:Nim --seeds 0 1 2 --out out
"""
