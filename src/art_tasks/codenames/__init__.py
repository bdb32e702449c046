"""Codenames, a word game for teams of two: a spymaster gives clues, and a guesser finds the team's words on a board."""
