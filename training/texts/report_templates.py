"""Templates, irrelevant sentences and names of `reports`: pure data, in a seen and a disjoint held-out half."""

from typing import NamedTuple


class Family(NamedTuple):
    """The templates of one kind of event; ``|`` separates alternatives.

    A small slot is a fact, the same letter as a capital is its decoy: another value of the same kind. Slots
    are ``p q`` people, ``t u`` towns, ``s`` surnames, and whatever ``numbers`` and ``words`` define. All
    phrasings of one fact hold the same slots, so that the summary never needs a value the source lacks.
    """

    name: str
    numbers: dict[str, tuple[int, int]]
    words: dict[str, str]
    facts: tuple[str, ...]
    decoys: str
    summary: str


class Names(NamedTuple):
    """What people and towns of one half are called: first names, parts of surnames, parts of towns."""

    first: list[str]
    surname: tuple[list[str], list[str], list[str]]
    town: tuple[list[str], list[str]]


SEEN = (
    Family(
        "match",
        {"n": (24, 39), "m": (6, 22)},
        {"r": "a strong defence|better fitness|a change of tactics|quick passing|fresh legs|calm kicking"},
        (
            "{u} and {t} played each other in the cup.|{t} met {u} in the cup.|The cup match was {u} against {t}.",
            "{t} won the match {n} to {m}.|The final score was {n} to {m} for {t}.|In the end {t} won {n} to {m}.",
            "{p} scored the winning try.|The winning points came from {p}.|It was {p} who scored the winning points.",
            "The reason for the win was {r}.|Coaches put the win down to {r}.|The win was explained by {r}.",
        ),
        "Last year the same match ended {N} to {M}.|{P} missed an easy kick in the first half."
        "|Many fans had travelled from {T}.|{Q} left the field with a sore knee."
        "|Some had expected {R} to decide the match.",
        "{t} beat {u} {n} to {m} in the cup because of {r}. {p} scored the winning points.",
    ),
    Family(
        "council",
        {"n": (21, 40), "m": (4, 20)},
        {
            "c": "a new bus lane|a skate park|a night market|a bicycle bridge|a car park|a wind farm|a toll road",
            "o": "approved|rejected",
            "r": "public safety|the cost|a report by experts|traffic|a petition|noise",
        },
        (
            "The council of {t} debated {c}.|The council of {t} met to discuss {c}.|{c} was before the {t} council.",
            "In the end the plan was {o} by {n} votes to {m}."
            "|The final vote was {n} to {m} and the plan was {o}."
            "|Members finally {o} the plan, {n} votes to {m}.",
            "Mayor {p} said the reason was {r}.|The reason, said Mayor {p}, was {r}.|Mayor {p} gave {r} as the reason.",
        ),
        "A vote on the same matter last year ended {N} to {M}.|Councillor {P} had asked for more time."
        "|Nearby {T} is planning {C}.|Some residents had expected {R} to matter."
        "|{Q} handed out leaflets at the door.",
        "The council of {t} {o} {c} by {n} votes to {m}. Mayor {p} gave {r} as the reason.",
    ),
    Family(
        "storm",
        {"n": (110, 890)},
        {"c": "the school roof|the old bridge|the harbour wall|the market hall|the church tower|the sports hall"},
        (
            "A storm hit {t} on Tuesday.|On Tuesday a storm passed over {t}.|Strong winds reached {t} on Tuesday.",
            "In total {n} homes lost power.|Power failed in {n} homes in all."
            "|The final count was {n} homes without power.",
            "The worst damage was to {c}.|The storm did its worst damage to {c}."
            "|Engineers found the worst damage at {c}.",
            "{p} led the crews that cleaned up.|The work to clean up was led by {p}."
            "|Crews led by {p} cleared the streets.",
        ),
        "A storm last year cut power to {N} homes.|{P} watched the clouds from a window."
        "|At first {C} seemed in danger.|Forecasters had expected the storm in {T}."
        "|{Q} found a garden chair in a tree.",
        "A storm hit {t} and left {n} homes without power. The worst damage was to {c}, and {p} led the crews.",
    ),
    Family(
        "company",
        {"n": (12, 390), "m": (20, 890)},
        {
            "c": "Foods|Motors|Paper|Glass|Textiles|Tools|Paints|Shoes",
            "r": "cheap energy|strong exports|a new factory|lower wages|online sales|a weak dollar|better machines",
        },
        (
            "{s} {c} reported its results.|The results of {s} {c} came out on Monday."
            "|On Monday {s} {c} gave its results.",
            "Profit this quarter was {n} million dollars."
            "|The final profit for the quarter was {n} million dollars."
            "|In total the quarter brought a profit of {n} million dollars.",
            "The main reason was {r}.|Managers gave {r} as the reason.|The result was explained by {r}.",
            "Chief {p} will hire {m} workers.|The firm will hire {m} workers, said chief {p}."
            "|Chief {p} is to hire {m} workers.",
        ),
        "A year ago profit was {N} million dollars.|Last year the firm hired {M} people."
        "|{S} {C} is its main rival.|Some analysts had expected {R} to matter more."
        "|Former chief {P} sat in the front row.",
        "{s} {c} made a profit of {n} million dollars because of {r}. Chief {p} will hire {m} workers.",
    ),
    Family(
        "museum",
        {"n": (30, 690), "m": (80, 890)},
        {"c": "Roman coins|old maps|glass birds|silver clocks|stone tools|paper masks|toy trains|war letters"},
        (
            "The museum in {t} opened a show of {c}.|A show of {c} opened at the museum in {t}."
            "|Lovers of {c} can now visit a show at the museum in {t}.",
            "The show holds {n} items in total.|In all there are {n} items on display.|The final list has {n} items.",
            "Curator {p} chose every item.|The items were chosen by curator {p}.|The curator of the show is {p}.",
            "The opening day drew {m} visitors.|In total {m} visitors came on the opening day."
            "|A final count gave {m} visitors on the opening day.",
        ),
        "Last year a show of {C} held {N} items.|The museum had expected {M} people."
        "|The former curator was {P}.|The show may later travel to {T}."
        "|{Q}, a painter, made a few sketches.",
        "The museum in {t} opened a show of {c} with {n} items chosen by {p}. The opening day drew {m} visitors.",
    ),
    Family(
        "train",
        {"n": (25, 190), "m": (60, 690)},
        {"r": "a broken signal|a fallen tree|a cow on the line|a power cut|an engine fault|a cracked rail|thick fog"},
        (
            "A train from {t} to {u} was held up.|The train to {u} left {t} on time but soon stopped."
            "|Travel from {t} to {u} took longer than planned.",
            "In the end the train was {n} minutes late.|The final delay was {n} minutes."
            "|The train finally arrived {n} minutes late.",
            "The cause was {r}.|Engineers named {r} as the cause.|The delay was caused by {r}.",
            "There were {m} passengers on board.|In total {m} passengers were on board.|On board were {m} passengers.",
        ),
        "At first staff spoke of {N} minutes.|A guard at first blamed {R}."
        "|A train bound for {T} was not affected.|{P} missed a job interview that day."
        "|Last week the train carried {M} people.|{Q} shared sandwiches in the aisle.",
        "A train from {t} to {u} with {m} passengers was {n} minutes late. The cause was {r}.",
    ),
    Family(
        "harvest",
        {"n": (40, 890)},
        {
            "c": "wheat|apple|potato|barley|grape|onion|cherry|carrot|cotton|pear",
            "r": "a wet spring|a dry summer|early frost|new seeds|mild weather|hungry birds|a late thaw|more bees",
        },
        (
            "Farmers near {t} brought in the {c} harvest.|The {c} harvest near {t} is over."
            "|Near {t} the {c} harvest has ended.",
            "The final harvest was {n} tonnes.|In total {n} tonnes were gathered.|Farmers gathered {n} tonnes in all.",
            "The reason for the result was {r}.|Farmers gave {r} as the reason.|The result was explained by {r}.",
            "{p} grew the largest crop.|The largest crop was grown by {p}.|The largest crop came from the farm of {p}.",
        ),
        "Last year the harvest was {N} tonnes.|{T} is better known for its {C} farms."
        "|{P} sold an old tractor to a neighbour.|Some had expected {R} to matter more."
        "|{Q} lost part of the crop to rabbits.",
        "Farmers near {t} gathered {n} tonnes in the {c} harvest because of {r}. {p} grew the largest crop.",
    ),
    Family(
        "fair",
        {"n": (120, 890), "m": (40, 390)},
        {"c": "a new piano|a climbing wall|sports kit|a school trip|a vegetable garden|laptops|a drama club|new books"},
        (
            "The school in {t} held its fair.|A school fair took place in {t}."
            "|Families in {t} went to the school fair.",
            "In total the fair raised {n} dollars.|The final sum raised was {n} dollars."
            "|The stalls raised {n} dollars in all.",
            "The money will pay for {c}.|All of it will be spent on {c}.|Teachers will use the money for {c}.",
            "{p} ran the fair for {m} guests.|The fair was run by {p} and had {m} guests."
            "|With {p} in charge, {m} guests came.",
        ),
        "Last year the fair raised {N} dollars.|Some parents had wanted {C}."
        "|{P} won a large cake in the raffle.|The school had expected {M} people."
        "|A choir from {T} sang three songs.|{Q} painted faces near the gate.",
        "The school fair in {t} raised {n} dollars for {c}. It was run by {p} and had {m} guests.",
    ),
    Family(
        "rescue",
        {"n": (4, 70)},
        {"c": "a narrow cave|a deep ditch|an old barn|a dry well|a forest hut|a steep gully|an empty mine"},
        (
            "A walker went missing near {t}.|A walker did not come home to {t}."
            "|People in {t} reported a missing walker.",
            "The walker, {p}, was found in {c}.|Finally the walker, {p}, was found in {c}."
            "|In the end {p} was found in {c}.",
            "The search took {n} hours in total.|In all the search lasted {n} hours."
            "|The final length of the search was {n} hours.",
            "{q} led the rescue team.|The rescue team was led by {q}.|The leader of the rescue team was {q}.",
        ),
        "A search last year lasted {N} hours.|{P} had raised the alarm in the evening."
        "|At first the team looked in {C}.|A helicopter from {T} could not land."
        "|{Q} brought hot soup for everyone.",
        "{p} was found in {c} near {t} after a search of {n} hours. The rescue team was led by {q}.",
    ),
    Family(
        "roadworks",
        {"n": (5, 90), "m": (30, 890)},
        {
            "c": "Mill Street|Station Road|Church Lane|Park Avenue|Bridge Street|Castle Road|Market Lane|King Street",
            "r": "a leaking pipe|deep cracks|new tram tracks|a sinking wall|old cables|flood damage|tree roots",
        },
        (
            "Workers in {t} will close {c}.|{c} in {t} is going to be closed."
            "|Drivers in {t} must avoid {c} from Monday.",
            "The road will be closed for {n} days in total.|In all the work will take {n} days."
            "|The final plan is {n} days of work.",
            "The reason is {r}.|The work is needed because of {r}.|Engineers gave {r} as the reason.",
            "The final cost is {m} thousand dollars.|In total the work will cost {m} thousand dollars."
            "|The town will pay {m} thousand dollars in all.",
        ),
        "Last year similar work took {N} days.|At first the cost was put at {M} thousand dollars."
        "|{C} stays open.|Some had at first suspected {R}.|{P} must walk to work for a while."
        "|Buses to {T} will use another stop.",
        "{c} in {t} will be closed for {n} days because of {r}. The work will cost {m} thousand dollars.",
    ),
    Family(
        "library",
        {"n": (11, 190), "m": (200, 890)},
        {},
        (
            "A new library has opened in {t}.|The people of {t} have a new library."
            "|In {t} a new library opened its doors.",
            "Writer {p} cut the ribbon.|The ribbon was cut by writer {p}.|It was writer {p} who cut the ribbon.",
            "In total the shelves hold {n} thousand books.|The library has {n} thousand books in all."
            "|The final stock is {n} thousand books.",
            "The final cost was {m} thousand dollars.|In the end the building cost {m} thousand dollars."
            "|The town paid {m} thousand dollars in total.",
        ),
        "The former library held {N} thousand books.|At first the cost was put at {M} thousand dollars."
        "|{P} borrowed a book about whales.|Children came by bus from {T}.|{Q} had wanted a larger garden.",
        "Writer {p} opened a new library in {t} with {n} thousand books. The building cost {m} thousand dollars.",
    ),
    Family(
        "tour",
        {"n": (200, 890), "m": (12, 99)},
        {"c": "the sea|city life|old friends|the desert|lost love|the moon|childhood|long winters|night trains"},
        (
            "Singer {p} ended a long tour in {t}.|A long tour by singer {p} ended in {t}."
            "|In {t} singer {p} closed a long tour.",
            "The tour had {m} concerts in total.|In all there were {m} concerts.|The final number of concerts was {m}.",
            "The last concert drew {n} fans.|In the end {n} fans came to the last concert."
            "|At the last concert were {n} fans.",
            "The next album will be about {c}.|Songs about {c} will fill the next album."
            "|The theme of the next album is {c}.",
        ),
        "Last year the tour had {M} concerts.|The hall had expected {N} people."
        "|A former album was about {C}.|{P} played the drums on every evening."
        "|A concert in {T} had been cancelled.|{Q} sold posters at the door.",
        "Singer {p} ended a tour of {m} concerts in {t} before {n} fans. The next album will be about {c}.",
    ),
)

HELD_OUT = (
    Family(
        "hospital",
        {"n": (10, 150), "m": (100, 999)},
        {"c": "heart|eye|burns|sleep|bone|lung|skin"},
        (
            "The {t} hospital now has a new {c} ward.|Patients in {t} can use a new {c} ward at the hospital.",
            "The ward has {n} beds in total.|In all the ward offers {n} beds.",
            "Doctor {p} is in charge of the ward.|The ward is led by Doctor {p}.",
            "The final bill was {m} thousand dollars.|In the end the ward cost {m} thousand dollars.",
        ),
        "The ward that stood there last year had {N} beds.|At first planners spoke of {M} thousand dollars."
        "|Nurse {P} handed out tea to the guests.|The {C} ward has not changed."
        "|Patients from {T} arrived by taxi.",
        "The hospital in {t} opened a new {c} ward with {n} beds. It is led by {p} and cost {m} thousand dollars.",
    ),
    Family(
        "film",
        {"n": (10, 160)},
        {
            "c": "a spy film|a ghost story|a war film|a comedy|a western|a love story|a film about sailors",
            "r": "snow|a lost camera|sick actors|a flooded studio|loud aircraft|an unfinished script",
        },
        (
            "Director {p} has shot {c} in {t}.|The streets of {t} were used for {c} by director {p}.",
            "In the end the shoot lasted {n} days.|The crew worked for {n} days in total.",
            "The shoot was slow, and the reason was {r}.|The slow pace was caused by {r}.",
            "{q} plays the main part.|The main part is played by {q}.",
        ),
        "Last year a shoot there lasted {N} days.|Some in the crew at first blamed {R}."
        "|{P} drove the truck with the cameras.|{Q} sewed most of the costumes by hand."
        "|Some scenes had been planned for {T}.",
        "Director {p} shot {c} in {t} in {n} days, slowed by {r}. The main part is played by {q}.",
    ),
    Family(
        "ferry",
        {"n": (60, 999), "m": (10, 99)},
        {"r": "a jammed rudder|heavy swell|a drifting net|a fire alarm|a leaking hull|a lost anchor"},
        (
            "The ferry between {t} and {u} had to turn back.|A ferry on its way from {t} to {u} turned back.",
            "The crew named {r} as the cause of the trouble.|The trouble was caused by {r}.",
            "In total {n} people were aboard.|The final list showed {n} people aboard.",
            "Captain {p} got back to port after {m} minutes.|It took Captain {p} {m} minutes to reach port.",
        ),
        "Last year {N} people sailed each day.|At first sailors suspected {R}."
        "|{P} dropped a suitcase overboard.|The boat to {T} sailed normally."
        "|A former trip to the islands took {M} minutes.|{Q} slept through the whole trip.",
        "A ferry from {t} to {u} with {n} people turned back because of {r}. Captain {p} reached port in {m} minutes.",
    ),
    Family(
        "prize",
        {"n": (10, 999), "m": (10, 120)},
        {"c": "desert frogs|deep ice|honey|river sand|bat wings|solar paint|volcanic dust|sea grass"},
        (
            "A science prize was awarded in {t}.|Scientists gathered in {t} for the award of a prize.",
            "The winner was {p}, who studies {c}.|Research on {c} won {p} the prize.",
            "The prize is worth {n} thousand dollars in total.|In all the winner gets {n} thousand dollars.",
            "The jury finally chose from {m} entries.|In total the jury read {m} entries.",
        ),
        "{P} had won the prize last year.|Last year the prize was worth {N} thousand dollars."
        "|Many had expected work on {C} to win.|{Q} read a short poem."
        "|A student group from {T} watched online.|A former jury read {M} entries.",
        "{p} won a science prize of {n} thousand dollars in {t} for work on {c}. The jury read {m} entries.",
    ),
    Family(
        "strike",
        {"n": (3, 99), "m": (30, 999)},
        {
            "c": "Steel|Airlines|Bricks|Ferries|Rubber|Cement|Dairies",
            "r": "low pay|long shifts|unsafe machines|unpaid overtime",
        },
        (
            "Staff at {s} {c} in {t} have ended a strike.|A strike at {s} {c} in {t} is over.",
            "The strike lasted {n} days in all.|In the end staff stayed away for {n} days.",
            "The reason for the strike was {r}.|Staff had walked out because of {r}.",
            "Union leader {p} won {m} dollars more a month.|A rise of {m} dollars a month was won by union leader {p}.",
        ),
        "A strike last year lasted {N} days.|At first managers had offered {M} dollars."
        "|{S} {C} was not involved.|Manager {P} refused to comment.|Drivers from {T} had sent food."
        "|Some papers had written about {R}.",
        "A strike at {s} {c} in {t} over {r} ended after {n} days. Leader {p} won {m} dollars more a month.",
    ),
)

# Sentences that fit any event; {a} {b} {k} are a person, a town and a number of no importance.
FILLERS_SEEN = (
    "Local radio carried the news at noon.|{a} took several photographs for the family album."
    "|A reporter from {b} asked a great many questions.|{a} stood nearby with {k} friends."
    "|The day had begun quietly.|Coffee and cake were served to everybody who came."
    "|Many people stayed until late in the evening.|{a} runs a small bakery in {b}."
    "|Nobody could remember anything quite like it.|A small crowd gathered outside."
    "|{a} did not want to comment.|Most people seemed happy with the way things went."
    "|It was the talk of {b} for days.|About {k} people posted pictures online."
    "|{a} moved here from {b} a long time ago.|The mood was calm.|A dog barked all afternoon."
    "|It was hard to find a place to park.|{a} has followed such events for {k} years."
    "|The buses were full from early morning on.|Others were less sure what to think of it."
    "|Police had little to do.|A second report is due next month.|{a} wrote a long letter to the paper."
    "|The shops in {b} closed early.|{a} called it a day to remember."
    "|Guests from {b} stayed at a small inn nearby.|There were {k} cars in the street."
    "|Older people just shook their heads.|The local paper printed {k} extra copies."
)
FILLERS_HELD_OUT = (
    "{a} followed everything on the phone.|Television crews arrived around lunch with a lot of equipment."
    "|Children waved small flags.|{a} came by bicycle from {b}.|Several questions stayed open for now."
    "|The hotel in {b} was fully booked.|Opinions differed widely among those present."
    "|A student named {a} counted {k} umbrellas.|Everyone seemed tired but content."
    "|Some {k} chairs stood empty.|Music could be heard from an open window."
    "|{a} sells flowers at a stand in {b}.|Hardly anyone noticed the light rain."
    "|Neighbours brought warm bread and cheese.|{a} smiled and walked away."
    "|More details should follow soon.|A website in {b} had {k} readers."
    "|The cafes did good business all week.|A clock struck twice.|{a} promised to come back."
    "|The evening was peaceful."
)

NAMES_SEEN = Names(
    """
    Aaron Abigail Adam Agnes Ahmed Aisha Alan Albert Alice Alma Amara Amir Amy Ana Andrea Andrew Anita
    Anna Anton Arjun Arthur Astrid Barbara Beatriz Ben Bianca Boris Brenda Brian Bruno Camila Carl
    Carmen Cecilia Chen Chloe Clara Colin Dan Daniel Daria David Deepak Diana Diego Dmitri Donna Dora
    Edith Edward Elena Eli Elif Ella Emil Emma Enzo Eric Esther Eva Fatima Felix Fiona Frank Freya
    Gabriel Gemma George Gloria Grace Greta Gustav Hamid Hana Hannah Harry Hassan Heidi Helen Henry
    Hugo Ian Ibrahim Ida Igor Imani Ines Ingrid Irene Isaac Ivan Jack Jamal James Jane Jasmine Javier
    Jenny Joan Joel John Jonas Jorge Josef Judith Julia Kai Karen Karim Kate Keiko Kenji Kevin Kofi
    Kwame Lara Lars Laura Leila Leo Lena Li Liam Lina Linda Lisa Louis Lucia Lucy Luis Luka Magda
    Maria Marco Mark Marta Martin Mary Maya Mei Miguel Mila Milan Mina Mohan Mona Nadia Naomi Nina
    Noah Nora Olaf Olga Oliver Omar Oscar Pablo Paul Pedro Peter Petra Priya Rachel Rahul Ravi Rosa
    Ruth Sami Sara Sofia
    """.split(),
    (
        (
            "Al|Ar|Ban|Ber|Bol|Cal|Car|Dal|Den|Dor|Fal|Far|Gar|Hal|Har|Jen|Kal|Kar|Lam|Lar|Mal|Mar"
            "|Nel|Nor|Pal|Per|Ros|San|Tar|Wal|Wil"
        ).split("|"),
        "||a|de|di|en|er|i|in|ko|la|ma|o|ri|ta|to".split("|"),
        "berg|dez|gan|kar|ley|man|mann|nak|nov|pur|rell|ric|sen|son|ski|tti".split("|"),
    ),
    (
        (
            "Alder|Ash|Beck|Black|Brook|Chester|Clay|Cold|Copper|Deer|East|Elm|Fair|Fox|Green|Hazel"
            "|High|King|Lang|Lin|Long|Maple|Mill|Oak|Red|Stan|Wood"
        ).split("|"),
        "bridge|brook|bury|dale|field|ford|ham|hill|land|more|port|stead|ton|well".split("|"),
    ),
)
NAMES_HELD_OUT = Names(
    """
    Abdul Adele Akira Aldo Amelie Anya Ariel Asha Axel Basil Bella Bodil Caleb Cyrus Dalia Derek Dilip
    Edgar Elsa Emre Ezra Farah Floyd Gina Giles Haruto Hilda Ilse Imran Iris Jelena Jude Kamal Kira
    Kurt Lorna Lydia Mabel Malik Matteo Mireille Monica Nasser Nigel Odile Otis Pavel Philip Quentin
    Ramona Rashid Renata Roland Rupert Sanjay Selma Sienna Stefan Sunita Tamara Thabo Tomas Ulrich
    Ursula Vera Victor Wanda Wendy Xavier Yara Yusuf Zoe
    """.split(),
    (
        "Bra|Cro|Dru|Fle|Gri|Hob|Ive|Klo|Lun|Mez|Ob|Pru|Quin|Ste|Tul|Vos".split("|"),
        "|ba|be|ge|lo|mi|ne|ra|su|vi".split("|"),
        "bert|chuk|dsen|fort|gui|lund|nez|quist|rossi|shaw|veld|zek".split("|"),
    ),
    (
        (
            "Amber|Birch|Crow|Dun|Ever|Frost|Gold|Heather|Iron|Juniper|Lark|Moss|North|Otter|Pine"
            "|Raven|Silver|Thorn|Winter|Yew"
        ).split("|"),
        "burn|cliff|combe|gate|haven|holm|mere|mouth|ness|thorpe|vale|wick".split("|"),
    ),
)
