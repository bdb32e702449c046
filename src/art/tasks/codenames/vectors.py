"""Unit vectors of words: made from our own table of themes, from letters, or read from a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from art.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = Mapping[str, NDArray[np.float32]]


_FAMILY, _OWN, _PER_RANK = 0.4, 0.3, 0.05
"""Length of a word's family dimension, and of its own dimension, which grows with its rank in the theme. A theme's
dimension has length 1. A word of one theme then has a cosine of 0.94 to 0.82 with the theme's name, and of about 0.1
with the name of another theme of the family."""
_MAX_FILE_CLUES = 5000
"""Number of clue words taken from a file of vectors. Such files begin with the most frequent words."""
_MAX_SHOWN = 20
_WANTED = "give a file in the text format of word2vec or GloVe: a word and its numbers on each line"


def read_themes() -> list[tuple[str, list[str], list[str]]]:
    """Read our own table: the family, the clue words and the board words of each theme."""
    rows = [[part.split() for part in line.split("|")] for line in THEMES.strip().splitlines()]
    return [(family[0], clues, words) for family, clues, words in rows]


def own_vectors() -> Vectors:
    """Make the vector of each word and clue of our own table: its themes, its families, and a dimension of its own."""
    features: dict[str, dict[str, float]] = {}
    for family, clues, words in read_themes():
        # A rank of -1 gives the theme's name a shorter dimension of its own than its most typical word has.
        for rank, word in [(-1, clues[0]), *((9, clue) for clue in clues[1:]), *enumerate(words)]:
            mine = features.setdefault(word, {f"word {word}": _OWN + _PER_RANK * rank})
            mine |= {f"theme {clues[0]}": 1.0, f"family {family}": _FAMILY}
    return _dense(features)


def letter_vectors(words: Iterable[str]) -> Vectors:
    """Make vectors of the counts of pairs of letters, with the ends of the word as letters."""
    return _dense({word: Counter(map("".join, zip(f"^{word}", f"{word}$", strict=True))) for word in words})


def _dense(features: Mapping[str, Mapping[str, float]]) -> Vectors:
    """Make unit vectors, in which each feature is a dimension."""
    import numpy as np

    places = {name: at for at, name in enumerate(dict.fromkeys(name for mine in features.values() for name in mine))}
    vectors: dict[str, NDArray[np.float32]] = {}
    for word, mine in features.items():
        vector = np.zeros(len(places), np.float32)
        vector[[places[name] for name in mine]] = list(mine.values())
        vectors[word] = vector / np.linalg.norm(vector)
    return vectors


def file_vectors(path: str, words: Sequence[str], clues: Sequence[str] | None) -> Vectors:
    """Read the vectors of `words` and `clues` from a file in the text format of word2vec and GloVe.

    A word of several parts, such as "ice cream", that the file does not have gets the mean of its parts.

    Args:
        clues: the only clues; `None` takes the first words of the file, which are its most frequent ones.

    Raises:
        ConfigError: the file cannot be read, or has no vector for a word.
    """
    vectors = _read_lines(path, {*words, *(clues or ())}, is_open=clues is None)
    for word in {*words, *(clues or ())} - set(vectors):
        parts = [vectors[part] for part in _parts(word) if part in vectors]
        if parts:
            mean = sum(parts[1:], parts[0])
            vectors[word] = mean / (mean @ mean) ** 0.5
    if missing := [word for word in words if word not in vectors]:
        raise ConfigError(
            f"{path!r} has no vector for {len(missing)} of the {len(words)} words: {', '.join(missing[:_MAX_SHOWN])}. "
            "Take them out of the words, or give another file"
        )
    if len({len(vector) for vector in vectors.values()}) > 1:
        raise ConfigError(f"the vectors of {path!r} have different lengths; {_WANTED}")
    return vectors


def _parts(word: str) -> list[str]:
    return word.replace("-", " ").split()


def _read_lines(path: str, names: set[str], *, is_open: bool) -> dict[str, NDArray[np.float32]]:
    """Read the vectors of `names` and of their parts; if `is_open`, also those of the file's first words."""
    searched = names | {part for name in names for part in _parts(name)}
    vectors: dict[str, NDArray[np.float32]] = {}
    num_open = _MAX_FILE_CLUES if is_open else 0
    try:
        with Path(path).expanduser().open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                word, _, numbers = line.strip().partition(" ")
                word = word.lower().replace("_", " ")
                if " " not in numbers or word in vectors:  # word2vec begins with a line of two numbers
                    continue
                takes = num_open > 0 and word.isalpha()
                if takes or word in searched:
                    vectors[word] = _unit(numbers, path, word)
                    num_open -= takes
    except OSError as error:
        raise ConfigError(f"cannot read vectors from {path!r}: {error}; {_WANTED}") from error
    return vectors


def _unit(numbers: str, path: str, word: str) -> NDArray[np.float32]:
    import numpy as np

    try:
        vector = np.array(numbers.split(), np.float32)
    except ValueError as error:
        raise ConfigError(f"{path!r} has no numbers after {word!r}; {_WANTED}") from error
    return vector / max(float(np.linalg.norm(vector)), 1e-9)


THEMES = """
water    | sea ocean marine      | wave tide coral sailor lagoon reef gull pearl foam seaweed
water    | fish fishing angler   | trout salmon shark tuna herring carp bait eel fin hook
water    | boat shipping vessel  | sail anchor ferry canoe paddle raft deck mast harbor hull
water    | river stream flow     | bank bridge dam ferry canoe pebble mud valley source ford
land     | mountain alpine       | peak cliff valley summit ledge cave goat echo slope trail
land     | desert arid           | sand cactus camel dune oasis mirage lizard scorpion heat nomad
land     | forest woodland       | pine moss owl trail fern mushroom bark squirrel log clearing
land     | city urban            | street tower tram bridge park taxi crowd square market statue
sky      | weather forecast      | storm rain cloud thunder wind frost fog hail rainbow breeze
sky      | space cosmic orbit    | rocket planet comet moon star galaxy crater shuttle sun alien
sky      | bird flying avian     | eagle robin gull owl swan nest wing feather parrot beak
sky      | winter cold icy       | snow frost sled scarf skate igloo glove penguin icicle ski
animals  | farm barn agriculture | horse cow goat tractor plough hen fence hay pig shepherd
animals  | pet household         | dog cat hamster parrot leash collar basket bark kennel rabbit
animals  | insect bug            | bee ant beetle moth wasp cricket spider hive web fly
animals  | jungle tropical wild  | tiger monkey snake parrot vine gorilla leopard drum swamp toucan
food     | fruit juicy           | apple pear plum lemon cherry peach grape melon orange fig
food     | bakery dough          | bread cake oven flour yeast pie roll crust pretzel wheat
food     | kitchen cooking       | pan knife spoon oven kettle bowl recipe plate apron tap
food     | drink beverage        | tea coffee juice wine cup straw bottle milk lemon soda
food     | vegetable salad       | carrot onion potato cabbage bean pepper leek radish pumpkin corn
body     | body anatomy          | hand knee elbow shoulder heart bone chest tongue skin nail
body     | face portrait         | nose cheek eyebrow chin lip ear beard smile mask freckle
body     | clothes wear fashion  | shirt coat sock scarf glove button collar belt hat apron
body     | doctor medical health | nurse pill bandage needle hospital fever bone cough mask patient
home     | house living          | roof door window chimney stair wall attic tap porch fence
home     | furniture carpentry   | table chair sofa shelf drawer lamp desk bench mirror stool
home     | bathroom washing      | soap towel mirror tap bath comb sponge brush drain razor
home     | bedtime sleep night   | bed pillow blanket dream lamp moon snore owl candle slipper
home     | garden outdoors       | rose lawn spade seed hose bench tulip fence weed worm
work     | tools workshop repair | hammer nail saw drill screw wrench axe bolt file glue
work     | office clerical       | desk paper printer file stapler meeting folder pen boss phone
work     | school lesson         | teacher chalk desk pupil bell pen exam ruler bus map
work     | money finance         | coin bank note wallet loan market cheque purse safe tax
work     | mail postal           | letter stamp envelope parcel note van address box pigeon card
travel   | road driving          | car lane bus tyre truck sign taxi van tunnel brake
travel   | railway trains        | track whistle tunnel engine carriage platform ticket signal bolt tram
travel   | airport aviation      | plane pilot wing runway passport suitcase ticket cabin gate tower
travel   | camping hike          | tent torch rope backpack compass log campfire map boot lantern
play     | music melody          | drum guitar violin piano flute trumpet note choir bell harp
play     | sport athletic        | goal racket bat whistle medal coach tennis net referee hockey
play     | circus carnival       | clown juggler acrobat tent lion trapeze drum popcorn ring whip
play     | theatre drama         | stage actor curtain mask ticket script audience costume scene box
play     | games hobby           | dice chess puzzle card kite marble domino pawn jigsaw board
past     | castle medieval       | king knight tower moat sword shield dungeon crown drawbridge throne
past     | pirate buccaneer      | treasure map parrot hook flag island cannon plank sword rum
past     | fairytale magic       | dragon witch wand giant princess spell frog potion unicorn ogre
past     | egypt pharaoh         | pyramid mummy sphinx camel tomb scroll sand curse cobra scarab
crime    | police detective      | badge thief cell siren dog clue witness chase handcuffs alibi
crime    | war army battle       | tank soldier cannon helmet medal bomb general trench drill flag
crime    | court justice         | judge lawyer witness jury bench gavel oath verdict trial prison
crime    | fire burning blaze    | flame smoke ash match candle siren hose campfire torch coal
"""
