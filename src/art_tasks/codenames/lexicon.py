"""The words that a game is played with, and how related a clue is to each of them.

    lexicon = load_lexicon()
    lexicon.relatedness("farm", ["cow", "wave"])        # array([0.93, 0.  ])

Relatedness is the cosine of two vectors, which are made from the table `THEMES`. Words of a theme are close, words of a
family a little, and typical words are closer to the theme's name than others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from art_tasks.codenames.game import BOARD_FORMS, BoardForm

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = Mapping[str, NDArray[np.float32]]

_FAMILY, _OWN, _PER_RANK = 0.4, 0.3, 0.05
"""Length of a word's family dimension, and of its own dimension, which grows with its rank in the theme. A theme's
dimension has length 1. A word of one theme then has a cosine of 0.94 to 0.82 with the theme's name, and of about 0.1
with the name of another theme of the family."""


@dataclass(frozen=True)
class Lexicon:
    """Words for boards, words for clues, and a vector for each of them."""

    words: tuple[str, ...]
    """Words that may lie on a board."""
    clues: tuple[str, ...]
    """Words that scripted spymasters choose clues from."""
    themes: Mapping[str, tuple[str, ...]]
    """Words of each theme."""
    vectors: Vectors
    """Unit vector [D] of each word and clue."""
    allowed_clues: frozenset[str] | None
    """The only clues that are legal; `None` if any word may be a clue."""

    @cached_property
    def _clue_vectors(self) -> NDArray[np.float32]:  # [C, D]
        import numpy as np

        return np.stack([self.vectors[clue] for clue in self.clues])

    def table(self, words: Sequence[str]) -> NDArray[np.float32]:
        """Cosine [C, W] of each word of `clues` with each of `words`."""
        import numpy as np

        table: NDArray[np.float32] = self._clue_vectors @ np.stack([self.vectors[word] for word in words]).T
        return table

    def relatedness(self, clue: str, words: Sequence[str]) -> NDArray[np.float32]:
        """Cosine [W] of a clue of the table with each of `words`."""
        import numpy as np

        return np.array([self.vectors[clue] @ self.vectors[word] for word in words], np.float32)


@cache
def load_lexicon(form: BoardForm = BOARD_FORMS["full"]) -> Lexicon:
    """Make the words, clues and vectors of a form of the game."""
    every = {clue_words[0]: tuple(words) for _, clue_words, words in read_themes()}
    chosen = {name: every[name][: form.words_per_theme] for name in form.themes or every}
    words = tuple(dict.fromkeys(word for theme in chosen.values() for word in theme))
    allowed = frozenset(form.themes) or None
    vectors = _own_vectors()
    usable = tuple(word for word in (sorted(allowed) if allowed else vectors) if word.isalpha())
    return Lexicon(words, usable, chosen, vectors, allowed)


def read_themes() -> list[tuple[str, list[str], list[str]]]:
    """Read the table: the family, the clue words and the board words of each theme."""
    rows = [[part.split() for part in line.split("|")] for line in THEMES.strip().splitlines()]
    return [(family[0], clues, words) for family, clues, words in rows]


def _own_vectors() -> Vectors:
    """Make the vector of each word and clue of the table: its themes, its families, and a dimension of its own."""
    features: dict[str, dict[str, float]] = {}
    for family, clues, words in read_themes():
        # A rank of -1 gives the theme's name a shorter dimension of its own than its most typical word has.
        for rank, word in [(-1, clues[0]), *((9, clue) for clue in clues[1:]), *enumerate(words)]:
            mine = features.setdefault(word, {f"word {word}": _OWN + _PER_RANK * rank})
            mine |= {f"theme {clues[0]}": 1.0, f"family {family}": _FAMILY}
    return _dense(features)


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
