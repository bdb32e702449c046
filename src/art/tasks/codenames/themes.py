"""The words of the game, written for this project: everyday words in themes, and the themes in families.

One line is one theme: its family, the words that serve only as clues for it (the first is its name), and its words on
boards, the most typical one first. A word may be in several themes: a bark is a part of a tree and a sound of a dog.
"""

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
