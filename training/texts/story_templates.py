"""Templates, names, things and number ranges of `stories`: pure data, in a seen and a disjoint held-out half."""

from typing import NamedTuple


class Family(NamedTuple):
    """Templates of one topic: " // " parts wordings, [a|b] is a choice, {a_x} is slot x with its article.

    The first sentence introduces a subject and is always told; the others are optional facts about it.
    """

    name: str
    pools: dict[str, str]
    sentences: tuple[str, ...]
    questions: dict[str, str]


class Half(NamedTuple):
    """What one half (training or held out) draws from; pools are by slot name unless a family has its own."""

    families: tuple[Family, ...]
    names: tuple[str, ...]
    parts: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
    pools: dict[str, str]
    ranges: dict[str, range]


_SEEN_NAMES = """
Anna Ben Carla David Elena Felix Greta Hassan Irene Jonas Karin Liam Maria Noah Olga Pedro Quentin Rosa Samir
Tara Ulrich Vera Walter Xenia Yusuf Zoe Aisha Bruno Chen Daria Emil Fatima Gustav Helena Igor Julia Kofi Laura
Marco Nadia Omar Paula Rafael Sonia Tomas Ursula Viktor Wendy Ximena Yara Zane Adam Beth Carl Diana Eric Fiona
George Hannah Ivan Jane Kevin Linda Martin Nora Oscar Petra Robert Susan Thomas Uma Vincent William Yvonne
Alice Boris Clara Dmitri Emma Frank Grace Henry Isabel Jack Kate Leo Mona Nils Olive Paul Rita Simon Tina
Akira Bianca Cyrus Dora Ebba Farid Gemma Hugo Ingrid Jorge Kenji Leila Mateo Naomi Otto Priya Ramon Sven
Thea Umar Vivian Wanda Yoko Zara Amara Basil Celia Dario Edith Flora Gerald Hiro Imani Jamal Kira Lars Mila
Nina Orhan Pablo Ravi Selma Tariq Ulla Viola Winston Yan Zelda Alma Bashir Chloe Derek Esther Floyd Gloria
Harold Ines Joel Klara Louis Marta Nigel Opal Philip Ruth Stefan Tanya Vince Wilma
"""
_HELD_NAMES = """
Abigail Anton Beatrice Cedric Chiara Conrad Delia Dominic Eduardo Elias Farah Fergus Gabriel Giulia Hamid
Harriet Ibrahim Iris Jasmin Jerome Kamal Keiko Lorenzo Lucy Malik Margot Nathan Nikolai Odette Oliver Pascal
Penelope Quincy Rachel Rashid Rebecca Roland Sabine Sergei Sophie Stella Tamara Theo Tobias Umberto Valerie
Vikram Wilhelm Yasmin Yolanda Zachary Zainab Agatha Alonso Bettina Caspar Desmond Evelyn Gideon Hector Judith
Kwame Lydia Magnus Noemi Ophelia Percy Rufus Salome Trevor
"""


def _f(name: str, pools: dict[str, str], *sentences: str, **questions: str) -> Family:
    return Family(name, pools, sentences, questions)


_WHEN = "[When|On which day|On what day] did {who} "
_COLOUR = "[What|Which] colour was the {0}? // What was the colour of the {0}?"
_WHY = "[Why|For what reason] did {who} "

_SEEN_FAMILIES = (
    _f(
        "market",
        {
            "item": "kettle, lamp, bicycle, carpet, mirror, clock, blanket, teapot, radio, suitcase, "
            "oven, umbrella, armchair, basket, vase, ladder, candle, pillow, bucket, desk"
        },
        "{who} bought {a_item} in {town}. // In {town}, {who} [bought|picked out] {a_item}.",
        "{who} paid {price} for the {item}. // The {item} cost {who} {price}.",
        "The {item} [that {who} bought |]was {colour}.",
        "{who} [gave|handed] the {item} to {friend}. // The {item} was a gift from {who} to {friend}.",
        "{who} bought the {item} on {day}. // On {day}, {who} went shopping for the {item}.",
        item="What did {who} buy[| in {town}]? // What was bought by {who}?",
        town="[Where|In which town|In what place] did {who} buy the {item}?",
        price="[How much|What] did {who} pay for the {item}? // How much did the {item} of {who} cost?",
        colour=_COLOUR.format("{item}[| of {who}]"),
        friend="To whom did {who} [give|hand] the {item}? // Who got the {item}[| from {who}]?",
        day=_WHEN + "buy the {item}?",
        who="Who bought [the {item}|{a_item}|something in {town}]? // Who paid {price}[| for the {item}]?",
    ),
    _f(
        "harvest",
        {
            "crop": "apples, pears, plums, cherries, lemons, carrots, onions, pumpkins, melons, "
            "walnuts, beans, figs, potatoes, peaches",
            "box": "sack, crate, tin, bowl, hamper, pot, tub, urn",
            "reason": "a storm was coming, winter was near, the birds were hungry, "
            "the guests wanted cake, "
            "the market was open, the cellar was empty, the branches were breaking",
        },
        "{who} picked {count} {crop} on {day}. // On {day}, {who} picked {count} {crop}.",
        "{who} worked on a farm near {town}. // The farm of {who} was near {town}.",
        "{who} put the {crop} in {a_box}. // The {crop} went into {a_box}.",
        "{who} sold the {crop} for {price}. // The {crop} earned {who} {price}.",
        "{who} picked the {crop} because {reason}.",
        crop="What did {who} pick[| on {day}]? // What was picked by {who}?",
        count="How many {crop} did {who} [pick|collect|gather]?",
        day=_WHEN + "pick the {crop}?",
        town="[Where was|Near which town was|Near what town was] the farm of {who}?",
        box="What did {who} put the {crop} in? // What held the {crop}[| of {who}]?",
        price="How much did {who} [get for|earn with] the {crop}? // For how much did {who} sell the {crop}?",
        reason=_WHY + "pick [the |]{crop}?",
        who="Who picked [{count}|the] {crop}? // Who sold {crop} for {price}? // Who had a farm near {town}?",
    ),
    _f(
        "job",
        {
            "job": "baker, nurse, tailor, plumber, teacher, farmer, driver, actor, editor, judge, barber, "
            "dentist, carpenter, waiter, lawyer, engineer, florist, butcher",
            "hobby": "chess, tennis, football, knitting, fishing, dancing, poetry, cycling, swimming, gardening",
        },
        "{who} worked as {a_job} in {town}. // In {town}, {who} [was|worked as] {a_job}.",
        "{who} became {a_job} in {year}. // In {year}, {who} started work as {a_job}.",
        "After work, {who} enjoyed {hobby}. // The hobby of {who} was {hobby}.",
        "{who} earned {price} a week. // Every week, {who} earned {price}.",
        "{who} [shared a house|lived] with {friend}.",
        job="What was the [job|profession|work] of {who}? // What [did {who} work as|job did {who} have]?",
        town="[Where|In which town|In what town] did {who} work?",
        year="[When|In which year|In what year] did {who} become {a_job}?",
        hobby="What was the hobby of {who}? // What did {who} enjoy[| after work]?",
        price="[How much|What] did {who} earn[| a week|every week]? // What was the pay of {who}?",
        friend="[Who did {who} live with|With whom did {who} live]? // Who shared a house with {who}?",
        who="Who [worked as|was] {a_job}? // Who worked in {town}? // Who enjoyed {hobby}? // Who earned {price}?",
    ),
    _f(
        "trip",
        {
            "ride": "train, bus, plane, taxi, tram, coach, van, jeep, ambulance, truck",
            "bag": "rucksack, trunk, hatbox, satchel, handbag, briefcase, album, accordion",
            "reason": "a cousin was ill, the weather was hot, the beach was famous, "
            "an uncle had a birthday, the museum was free, a job was open, the house was cold",
        },
        "{who} [went|travelled] to {town} by {ride}. // {who} took {a_ride} to {town}.",
        "{who} left at {time}. // At {time}, {who} set off.",
        "{who} made the trip because {reason}. // {who} went to {town} because {reason}.",
        "{who} travelled with {friend}. // The companion of {who} was {friend}.",
        "{who} [carried|brought along] {a_bag}.",
        town="[Where|To which town|To what place] did {who} [go|travel]?",
        ride="How did {who} [get|travel] to {town}? // What did {who} take to {town}?",
        time="[When|At what time|What time] did {who} [leave|set off]?",
        reason=_WHY + "[go to {town}|travel to {town}|make the trip]?",
        friend="Who [travelled with {who}|was the companion of {who}]? // With whom did {who} travel?",
        bag="What did {who} carry[| to {town}]? // What was carried by {who}?",
        who="Who [went|travelled] to {town}? // Who [left|set off] at {time}? // Who carried {a_bag}?",
    ),
    _f(
        "pet",
        {
            "animal": "dog, cat, rabbit, parrot, pony, hamster, goat, turtle, duck, goose, owl, iguana",
            "pet": "Biscuit, Pepper, Shadow, Button, Muffin, Rusty, Patch, Ginger, Bubbles, Socks, Pickle, Domino",
            "food": "oats, bread, cheese, lettuce, corn, rice, clover, bananas, fish, seeds",
            "bed": "kitchen, cellar, attic, barn, garage, hallway, shed, office",
        },
        "{who} had {a_animal} called {pet}. // {pet} was {a_animal} that belonged to {who}.",
        "The {animal} was {colour}.",
        "{pet} [liked to eat|often ate] {food}. // The favourite food of {pet} was {food}.",
        "{pet} slept in the {bed}. // At night, {pet} slept in the {bed}.",
        "{who} got {pet} from {friend}. // {friend} gave {pet} to {who}.",
        animal="[What|Which|What kind of] animal was {pet}? // [What|Which] animal did {who} have?",
        pet="What was the name of the {animal}[| of {who}]? // What did {who} call the {animal}?",
        colour=_COLOUR.format("{animal}[| of {who}]"),
        food="What did {pet} [eat|like to eat]? // What was the [|favourite ]food of {pet}?",
        bed="Where did {pet} sleep[| at night]? // In which [room|place] did {pet} sleep?",
        friend="Who gave {pet} to {who}? // From whom did {who} get {pet}? // Who did {who} get {pet} from?",
        who="Who had {a_animal}[| called {pet}]? // To whom did {pet} belong? // Who owned {pet}?",
    ),
    _f(
        "lost",
        {
            "item": "key, wallet, ring, glove, scarf, ticket, phone, purse, watch, hat, pen, coin, passport",
            "spot": "park, museum, cinema, airport, harbour, forest, stadium, cafe, hotel, zoo",
            "cover": "bench, sofa, stone, table, leaf, newspaper, rug, bush, chair, box",
        },
        "{who} lost {a_item} in the {spot}. // In the {spot}, {who} lost {a_item}.",
        "{friend} found the {item}. // The {item} was found by {friend}.",
        "The {item} was under {a_cover}. // The {item} of {who} lay under {a_cover}.",
        "{who} lost the {item} on {day}. // On {day}, {who} lost the {item}.",
        "The {item} was worth {price}. // The value of the {item} was {price}.",
        item="What did {who} lose[| in the {spot}]? // What was lost by {who}?",
        spot="[Where|In which place|In what place] did {who} lose the {item}?",
        friend="Who found the {item}[| of {who}]? // By whom was the {item} found?",
        cover="What was the {item}[| of {who}] under? // Under what [was|lay] the {item}?",
        day=_WHEN + "lose the {item}?",
        price="[How much|What] was the {item}[| of {who}] worth? // What was the value of the {item}?",
        who="Who lost [the {item}|{a_item}|something in the {spot}]? // Who was the owner of the {item}?",
    ),
    _f(
        "library",
        {
            "topic": "dragons, rivers, trains, bees, pirates, volcanoes, castles, robots, knights, "
            "planets, ghosts, farming, clouds, spiders"
        },
        "{who} borrowed a book about {topic} in {town}. // In {town}, {who} borrowed a book about {topic}.",
        "The book about {topic} had {pages}.",
        "{who} returned the book[| about {topic}] on {day}. // On {day}, {who} took the book back.",
        "{friend} wrote the book about {topic}. // The book about {topic} was written by {friend}.",
        "The book about {topic} had {a_colour} cover. // The cover of the book about {topic} was {colour}.",
        topic="What was the book of {who} about? // What did {who} borrow a book about[| in {town}]?",
        town="[Where|In which town|In what place] did {who} borrow the book[| about {topic}]?",
        pages="How [many pages did the book about {topic} have|long was the book about {topic}|many pages "
        "were in the book about {topic}]?",
        day=_WHEN + "[return|take back] the book[| about {topic}]?",
        friend="Who [wrote|was the author of] the book about {topic}? // By whom was the book about {topic}?",
        colour=_COLOUR.format("cover of the book about {topic}"),
        who="Who borrowed [the|a] book about {topic}? // Who borrowed a book in {town}?",
    ),
    _f(
        "kitchen",
        {
            "dish": "soup, stew, pancakes, curry, pasta, dumplings, porridge, lasagna, chili, noodles",
            "spice": "salt, garlic, honey, ginger, mint, butter, cinnamon, vinegar, mustard, sugar",
            "reason": "it was a birthday, the shop was closed, the guests were hungry, "
            "the fridge was full, "
            "the evening was cold, a friend was sad, the restaurant was full",
        },
        "{who} cooked {dish} for {friend}. // For {friend}, {who} cooked {dish}.",
        "{who} cooked for {minutes}. // The work took {who} {minutes}.",
        "{who} [added some {spice}|used some {spice}]. // {who} put {spice} in the {dish}.",
        "{who} served the {dish} at {time}. // At {time}, {who} served the {dish}.",
        "{who} [made|cooked] the {dish} because {reason}.",
        dish="What did {who} [cook|make][| for {friend}]? // What was cooked by {who}?",
        friend="For whom did {who} cook? // Who did {who} [cook|make the {dish}] for?",
        minutes="How long did {who} cook? // How [long|many minutes] did the work take {who}?",
        spice="What did {who} [add|put in the {dish}|use in the {dish}]?",
        time="[When|At what time|What time] did {who} serve the {dish}?",
        reason=_WHY + "[make|cook] the {dish}?",
        who="Who cooked [the |]{dish}? // Who cooked for [{friend}|{minutes}]? // Who [added|used] {spice}?",
    ),
    _f(
        "race",
        {"prize": "medal, cup, trophy, ribbon, camera, voucher, helmet, whistle, apron, lantern"},
        "{who} ran a race in {town}. // In {town}, {who} ran a race.",
        "{who} finished in {minutes}. // It took {who} {minutes} to finish.",
        "{who} won {a_prize}. // The prize of {who} was {a_prize}.",
        "{who} wore {a_colour} shirt. // The shirt of {who} was {colour}.",
        "{friend} trained {who}. // {who} was trained by {friend}.",
        "The race of {who} was on {day}. // On {day}, {who} ran.",
        town="[Where|In which town|In what place] did {who} run[| a race]?",
        minutes="How [long|many minutes] did {who} [need|take][| to finish]?",
        prize="[What|Which prize|What prize] did {who} win? // What was the prize of {who}?",
        colour=_COLOUR.format("shirt of {who}"),
        friend="Who [trained|was the trainer of] {who}? // By whom was {who} trained?",
        day=_WHEN + "run?",
        who="Who ran [a race |]in {town}? // Who won {a_prize}? // Who finished in {minutes}?",
    ),
    _f(
        "building",
        {
            "site": "tower, bridge, church, school, theatre, windmill, station, bakery, bank, arena, inn",
            "stuff": "brick, granite, timber, marble, steel, concrete, clay, sandstone",
        },
        "The {site} in {town} was built in {year}. // In {year}, {a_site} was built in {town}.",
        "{friend} designed the {site}. // The {site} in {town} was designed by {friend}.",
        "The {site} cost {price}. // The town of {town} paid {price} for the {site}.",
        "The {site} [had|was given] {count} windows.",
        "The {site} was made of {stuff}. // The builders in {town} used {stuff}.",
        site="What was built in [{town}|{year}|{town} in {year}]?",
        town="[Where|In which town|In what place] was the {site}[| built]?",
        year="[When|In which year|In what year] was the {site}[| in {town}] built?",
        friend="Who [designed|was the architect of] the {site}[| in {town}]? // By whom was the {site} designed?",
        price="[How much|What] did the {site}[| in {town}] cost? // How much was paid for the {site}?",
        count="How many windows [did the {site} have|were there in the {site}|had the {site} in {town}]?",
        stuff="What was the {site}[| in {town}] made of? // [What|Which] material was used in {town}?",
    ),
    _f(
        "post",
        {
            "mail": "letter, parcel, package, envelope, bundle, crate, carton, sack, tin",
            "thing": "photos, stamps, marbles, buttons, spoons, cookies, ribbons, shells, pencils, tickets",
        },
        "{who} sent {a_mail} to {friend}. // {friend} got {a_mail} from {who}.",
        "{who} [posted|sent] the {mail} on {day}. // On {day}, {who} went to the post office.",
        "The {mail} [came from|was posted in] {town}. // {who} posted the {mail} in {town}.",
        "There were {count} {thing} in the {mail}. // {who} put {count} {thing} in the {mail}.",
        "{who} paid {price} for the {mail}. // The {mail} cost {who} {price}.",
        mail="What did {who} send[| to {friend}]? // What did {friend} get[| from {who}]?",
        friend="To whom did {who} send [the {mail}|{a_mail}]? // Who got the {mail}[| from {who}]?",
        day=_WHEN + "[post|send] the {mail}?",
        town="[Where|In which town|In what place] did {who} post the {mail}?",
        count="How many {thing} were in the {mail}? // How many {thing} did {who} [send|put in the {mail}]?",
        thing="What [was|did {who} put] in the {mail}? // What did the {mail} of {who} contain?",
        price="[How much|What] did {who} pay for the {mail}? // How much did the {mail} cost {who}?",
        who="Who sent [the {mail}|{a_mail}]? // Who sent something to {friend}? // Who posted the {mail}?",
    ),
)

_HELD_FAMILIES = (
    _f(
        "painting",
        {
            "scene": "waterfall, sunset, meadow, lighthouse, orchard, village, glacier, canal, island, vineyard",
            "frame": "gold, bamboo, copper, walnut wood, plastic, ivory, leather, glass",
        },
        "{who} painted {a_scene} in {year}. // In {year}, {who} made a painting of {a_scene}.",
        "The painting of the {scene} hangs in {town}. // Visitors in {town} can see the painting of the {scene}.",
        "{friend} owns the painting of the {scene}. // The painting of the {scene} belongs to {friend}.",
        "The frame of the {scene} is made of {frame}.",
        "The sky above the {scene} is {colour}.",
        scene="What did {who} paint[| in {year}]? // What is shown in the painting by {who}?",
        year="[When|In which year|In what year] did {who} paint the {scene}?",
        town="Where [does the painting of the {scene} hang|can visitors see the painting of the {scene}|"
        "is the painting of the {scene}]?",
        friend="Who [owns|is the owner of] the painting of the {scene}? // To whom does the {scene} painting belong?",
        frame="What is the frame of the {scene}[| by {who}] made of? // Which material is the {scene} frame made of?",
        colour="[What|Which] colour is the sky above the {scene}[| by {who}]?",
        who="Who painted [the|a picture of the] {scene}? // Who made a painting in {year}?",
    ),
    _f(
        "voyage",
        {
            "ship": "Sea Falcon, Morning Tide, Silver Wave, Old Dolphin, Lucky Star, Brave Heron, "
            "Salty Wind, Western Queen",
            "cargo": "cotton, coffee, silk, coal, wool, tea, cocoa, rubber, pearls, maize",
        },
        "Captain {who} sailed the {ship} to {town}. // The {ship} sailed to {town} under Captain {who}.",
        "The {ship} carried {cargo}. // {who} had a cargo of {cargo}.",
        "A crew of {count} sailors [worked on|kept] the {ship}. // The {ship} had {count} sailors.",
        "{who} reached the port in {month}. // In {month}, the {ship} arrived.",
        "{friend} was the owner of the {ship}. // The {ship} belonged to {friend}.",
        ship="[What|Which] ship did Captain {who} sail? // What was the name of the ship of Captain {who}?",
        town="[Where|To which port|To what port] did [the {ship}|Captain {who}] sail?",
        cargo="What [did the {ship} carry|was the cargo of the {ship}|was on board the {ship}]?",
        count="How many sailors [did the {ship} have|were on the {ship}|worked on the {ship}]?",
        month="[When|In which month|In what month] did the {ship} [arrive|reach the port]?",
        friend="Who [owned|was the owner of] the {ship}? // To whom did the {ship} belong?",
        who="Who [was the captain of|sailed] the {ship}? // Which captain sailed to {town}?",
    ),
    _f(
        "concert",
        {
            "tool": "violin, flute, cello, harp, trumpet, organ, oboe, banjo, clarinet, tuba, drum",
            "coat": "cape, gown, vest, jacket, robe, sweater, tie, overcoat",
            "reason": "the lights went out, a string broke, the singer fainted, somebody shouted, "
            "the stage was wet, an alarm rang, the bus was waiting",
        },
        "{who} played the {tool} at a concert in {town}. // At the concert in {town}, {who} played the {tool}.",
        "{count} people [heard|listened to] {who}. // {who} played for {count} people.",
        "{who} wore {a_coat} on the stage. // On the stage, {who} had {a_coat} on.",
        "{who} learned the {tool} from {friend}. // {friend} taught {who} the {tool}.",
        "{who} stopped early because {reason}.",
        "The concert in {town} was held in {month}. // In {month}, {who} gave the concert.",
        tool="[What|Which instrument|What instrument] did {who} play[| in {town}]?",
        town="[Where|In which city|In what city] did {who} play[| the {tool}]?",
        count="How many people [heard|listened to] {who}? // For how many people did {who} play?",
        coat="What [did {who} wear|did {who} have on]? // What clothing was {who} wearing on the stage?",
        friend="Who taught {who} the {tool}? // From whom did {who} learn the {tool}? // Who was the teacher of {who}?",
        reason="[Why|For what reason] did {who} stop[| early]?",
        month="[When|In which month|In what month] was the concert of {who}?",
        who="Who played [the {tool}|in {town}]? // Who [performed with|was heard on] the {tool}?",
    ),
    _f(
        "wildlife",
        {
            "animal": "herons, otters, foxes, seals, beavers, eagles, bats, moose, wolves, swans, lizards, badgers",
            "tool": "telescope, drone, notebook, sound recorder, tablet, net, mask, atlas",
            "reason": "the snow had melted, a fire had started, the lake was dry, hunters had come, "
            "the noise was loud, the eggs had hatched, the ice was thin",
        },
        "{who} counted {count} {animal} near {town}. // Near {town}, {who} counted {count} {animal}.",
        "{who} studied the {animal} with {a_tool}. // To study the {animal}, {who} needed {a_tool}.",
        "{who} began to watch at {time}. // At {time}, {who} saw the first of the {animal}.",
        "The {animal} moved away because {reason}.",
        "{who} wrote a report for {friend}. // The report by {who} went to {friend}.",
        animal="[What|Which animals|What animals] did {who} [count|study][| near {town}]?",
        count="How many {animal} [did {who} count|were counted by {who}|were counted near {town}]?",
        town="[Where|Near which town|Near what town] did {who} count the {animal}?",
        tool="What did {who} [use|need] to study the {animal}? // With what did {who} study the {animal}?",
        time="[When|At what hour|At what time] did {who} [begin to watch|start to watch the {animal}]?",
        reason="[Why|For what reason] did the {animal} [move away|leave]?",
        friend="For whom did {who} write a report? // Who [got|received] the report by {who}?",
        who="Who [counted|studied] the {animal}? // Who counted animals near {town}?",
    ),
    _f(
        "summit",
        {
            "gear": "rope, compass, stove, hammock, shovel, axe, oxygen mask, flare, sledge",
            "reason": "the fog was thick, a boot was torn, the path was icy, the water had run out, "
            "an avalanche fell, the map was wrong, night was falling",
        },
        "{who} climbed Mount {town} in {month}. // In {month}, {who} climbed Mount {town}.",
        "The climb took {who} {hours}. // {who} climbed for {hours}.",
        "{who} had {a_gear} along. // On the mountain, {who} relied on {a_gear}.",
        "The guide of {who} was {friend}. // {friend} guided {who}.",
        "{who} turned back because {reason}.",
        "The tent of {who} was {colour}. // {who} slept in {a_colour} tent.",
        town="[Which|What] mountain did {who} climb[| in {month}]? // What was climbed by {who}?",
        month="[When|In which month|In what month] did {who} climb Mount {town}?",
        hours="How [long|many hours] did [the climb take {who}|{who} climb]?",
        gear="What [did {who} have along|did {who} rely on|gear did {who} have]?",
        friend="Who [guided|was the guide of] {who}? // By whom was {who} guided?",
        reason="[Why|For what reason] did {who} turn back? // What made {who} turn back?",
        colour="[What|Which] colour [was the tent of {who}|of tent did {who} have]?",
        who="Who climbed Mount {town}? // Who made a climb in {month}? // Who was guided by {friend}?",
    ),
)

UNITS = {"price": " dollars", "pages": " pages", "minutes": " minutes", "hours": " hours"}
HALVES = {
    False: Half(
        _SEEN_FAMILIES,
        tuple(_SEEN_NAMES.split()),
        {
            "town": (
                tuple("Brack Wend Hol Mar Ash Nor Till Crom Del Farn Grim Lang Pem Stan Wal Red".split()),
                ("ford", "ton", "bury", "field", "ham", "wick", "mouth", "dale", "well"),
            ),
            "surname": (
                ("Bar", "Cor", "Den", "Fal", "Gor", "Hal", "Kel", "Mor", "Pal", "Ros", "Tam", "Ver"),
                ("sen", "man", "elli", "ova", "ner", "dez", "kin", "aki", "more", "sky"),
            ),
        },
        {
            "colour": "red, blue, green, white, grey, yellow",
            "day": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
        },
        {
            "count": range(2, 60),
            "minutes": range(10, 60),
            "price": range(100, 500),
            "pages": range(100, 500),
            "year": range(1800, 1950),
            "time": range(6, 12),
        },
    ),
    True: Half(
        _HELD_FAMILIES,
        tuple(_HELD_NAMES.split()),
        {
            "town": (
                ("Ox", "Quar", "Sel", "Thorn", "Up", "Yar", "Zel", "Elk", "Ivy", "Jor", "Kirk", "Vel"),
                ("stead", "minster", "port", "holm", "crest", "haven", "gate", "moor"),
            ),
            "surname": (
                ("Abr", "Eng", "Lind", "Nak", "Oll", "Stro", "Um", "Wes"),
                ("amura", "berg", "ecki", "iano", "ulov", "quist", "ante", "ish"),
            ),
        },
        {
            "colour": "purple, orange, brown, pink, silver, black",
            "month": "January, February, March, April, May, June, July, August, September, October, November, December",
        },
        {"count": range(60, 100), "hours": range(60, 100), "year": range(1950, 2025), "time": range(1, 6)},
    ),
}
