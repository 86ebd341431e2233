"""Things, verbs, facts and names of `composed_stories`: pure data, disjoint from the held-out `story_templates`."""

# A class of things: how they are counted (a: one of them, n: some of them, s: stuff, t: one with a name of its own, l:
# a place with a name, x: one about something), what they are called, what one can do with them, and the things.
THINGS = """
a | thing household | buy sell repair borrow find hide clean break steal carry order return wrap drop lend keep move
  choose hang check give take weigh | kettle, lamp, carpet, mirror, clock, blanket, teapot, radio, umbrella, armchair,
  basket, vase, ladder, candle, pillow, bucket, desk, sofa, curtain, toaster, saucepan, mattress, cupboard, broom,
  kitchen scale, bottle, shelf, bathtub, doormat, lampshade, tray, stool, jug, plate, bowl, mug, fork, spoon, chest,
  cushion, fan, heater, iron
a | tool machine | buy sell repair borrow find clean break steal order return rent lend test oil build invent lose
  bring give sharpen | hammer, saw, drill, wrench, screwdriver, pump, printer, camera, sewing machine, lawnmower,
  chainsaw, calculator, typewriter, keyboard, microscope, thermometer, torch, spade, rake, wheelbarrow, paintbrush,
  pair of scissors, tape measure, battery, magnet, generator, cash register, projector, loudspeaker, laptop, scanner,
  jukebox, hoist, chisel, file, level
a | garment | buy sell sew knit iron wash mend fold lose borrow design dye choose order return shrink tear give find
  pack | shirt, skirt, coat, scarf, hat, glove, sock, dress, blouse, cardigan, belt, apron, uniform cap, raincoat,
  pyjama top, bonnet, kimono, swimsuit, sandal, clog, slipper, helmet, turban, poncho, waistcoat, bow, handkerchief,
  mitten, hood, sari, kilt
a | toy game | buy build find lose break repair hide wrap borrow invent choose give sell throw keep | kite, puzzle,
  doll, teddy bear, train set, yo-yo, spinning top, skateboard, ball, marble, whistle, rocking horse, board game, water
  pistol, balloon, frisbee, dollhouse, card game, boomerang, robot, scooter, trampoline, domino, hula hoop, jigsaw,
  puppet, model car
a | vehicle | drive buy sell repair wash rent borrow steal park tow inspect test choose design | van, truck, lorry,
  tractor, bicycle, motorbike, minibus, taxi, jeep, caravan, tram, canoe, kayak, raft, rowing boat, hot-air balloon,
  glider, helicopter, fire engine, cart, carriage, snowmobile, ambulance, convertible, moped, tricycle, digger, camper
a | animal | feed wash rescue train brush photograph catch adopt follow buy sell draw chase calm find lose | dog, cat,
  rabbit, parrot, pony, hamster, goat, turtle, duck, goose, donkey, horse, hen, sheep, cow, pig, mouse, canary, ferret,
  camel, llama, tortoise, calf, lamb, puppy, kitten, peacock, budgie, guinea pig, hedgehog, mule, ox, turkey, pigeon,
  snake, frog, monkey
n | animal | feed catch photograph keep sell train watch release draw breed buy find protect | rabbits, hens, geese,
  ducks, goats, sheep, pigeons, mice, snails, butterflies, spiders, frogs, trout, crabs, ants, hedgehogs, parrots,
  donkeys, ponies, moths, squirrels, deer, owls, sparrows, ravens, turtles, shrimps, salmon, monkeys, penguins, camels,
  worms, wasps, beetles
n | crop fruit vegetable | pick plant grow sell wash peel slice freeze pack weigh buy harvest order store | apples,
  pears, plums, cherries, lemons, carrots, onions, pumpkins, melons, figs, potatoes, peaches, beans, cabbages,
  radishes, leeks, olives, grapes, nuts, turnips, tomatoes, peppers, limes, mangoes, apricots, cucumbers, dates,
  beetroots, artichokes, strawberries
n | thing item | buy sell collect count_up find order pack print deliver lose donate stack wrap throw_away sort send
  give | stamps, buttons, tickets, postcards, coins, photos, bottles, bricks, tiles, cups, envelopes, shells, badges,
  keys, pencils, chairs, boxes, nails, ribbons, posters, candles, magazines, spoons, plates, balloons, medals,
  blankets, lanterns, cushions, forks, ladders, wheels, batteries, jars, baskets, labels, calendars, bells, dice,
  flags, screws, beads, crayons, vases
s | dish food | cook bake eat order serve taste burn prepare share deliver heat make bring | soup, stew, pasta, curry,
  porridge, rice, bread, salad, pizza, lasagna, pudding, chowder, risotto, goulash, apple cake, fish pie, roast lamb,
  fried rice, jam, scrambled eggs, noodles, mashed potatoes, stuffed peppers, couscous, gravy, paella, toast, pickles,
  garlic bread, custard
s | material stuff | buy sell order deliver carry store cut weigh collect measure load spill use recycle send | sand,
  gravel, clay, timber, marble, paper, wire, cardboard, straw, hay, linen, velvet, lace, denim, felt, paint, salt,
  flour, sugar, vinegar, wheat, barley, firewood, charcoal, soap, wax, petrol, ink, glue, milk, butter, cheese, rice,
  oats, lemonade, cider, ice
a | document text | write read send sign print translate publish copy hide burn finish tear find lose keep | letter,
  diary, report, postcard, poem, contract, recipe, menu, invitation, map, article, will, speech, dictionary, cookbook,
  novel, brochure, catalogue, timetable, essay, petition, certificate, telegram, leaflet, manual, bill, list, song,
  fairy tale, thesis, memo
a | building | build design visit close open clean repair buy guard inspect sell sketch leave enter rent | school,
  church, barn, garage, hotel, library, bakery, bank, museum, theatre, station, factory, warehouse, cottage, mill,
  greenhouse, gym, castle, stable, chapel, palace, temple, post office, shop, bungalow, tower, prison, pharmacy, kiosk,
  cabin, farmhouse, clinic, inn
a | plant | plant water cut sell grow buy move draw photograph prune dig_up give destroy | rose, tulip, oak, fern,
  cactus, lily, daisy, ivy, palm tree, willow, sunflower, orchid, cherry tree, bush, hedge, lemon tree, birch, elm,
  poppy, violet, thistle, lavender bush, fig tree, pine, carnation, geranium, daffodil, herb, moss ball, chestnut tree,
  crocus, iris, peony, yew
a | jewel gift | buy steal sell lose find give design polish insure hide wear_out inherit choose receive keep | ring,
  necklace, bracelet, brooch, watch, earring, crown, locket, chain, pendant, tiara, pin, diamond, ruby, emerald, music
  box, vase, medal, perfume bottle, wallet, purse, statue, figurine, hairpin, comb, fountain pen, chess set, picture
  frame, trophy, bookend
x | book | write read borrow publish buy return lose translate finish | book about, novel about, story about, guide to,
  poem about, play about, article about, lecture on, report on, essay on, song about, programme about
x | picture | draw buy frame sell hang print send find keep steal | photo of, drawing of, sketch of, statue of, map of,
  poster of, postcard of, model of, sculpture of, mosaic of, stamp of, carving of, copy of, plan of
t | place | open run close buy sell visit rent clean manage paint_over | cafe, restaurant, hotel, pub, shop, bakery,
  cinema, farm, garden centre, bookshop, club, bar, juice bar, nightclub, hostel, ranch, toy shop, kiosk, diner, salon
t | horse machine | ride buy sell repair wash rent race train | horse, train, bus, tram, balloon, rocket, racing car,
  pony, motorbike, tractor, camel, canoe, glider, airship, mule, donkey
l | Lake | visit cross swim_across photograph map explore leave reach | lake
l | Castle | visit buy sell guard restore photograph leave enter sketch | castle
l | Fort | defend visit build reach leave photograph repair | fort
l | Hotel | run open visit leave manage clean buy | hotel
l | Bay | reach cross map photograph visit leave | bay
l | Saint | praise thank admire mention remember celebrate | saint
"""

# Verbs with a preposition, and which things stand behind them (a class by the first of its things, or a town).
AT = """
look for: kettle hammer ring dog rose scarf stamps | wait for: van letter | ask for: soup letter sand kettle | pay for:
kettle soup ring scarf stamps rose | dream of: dog van school ring rose | search for: dog ring letter stamps | care
for: rabbit dog rose rabbits | laugh at: dog letter scarf | play with: kite dog | talk about: dog school van letter
town | complain about: soup van hotel scarf | read about: school sand town rabbits | write about: school town dog
apples | walk to: school town | drive to: town school | fly to: town | move to: town | travel to: town | ride to: town
school | return to: town school | camp near: town | stay in: town | live in: town | work in: town | get married in:
town | study in: town | fall asleep in: van school | worry about: dog school | vote for: school | point at: dog ring |
lean on: kettle rose | trip over: dog kettle kite | come back with: ring dog letter stamps
"""

IRREGULAR = """
buy bought bought, sell sold sold, break broke broken, steal stole stolen, keep kept kept, choose chose chosen, find
found found, hide hid hidden, lend lent lent, hang hung hung, give gave given, take took taken, drop dropped dropped,
wrap wrapped wrapped, build built built, lose lost lost, bring brought brought, sew sewed sewn, shrink shrank shrunk,
tear tore torn, throw threw thrown, drive drove driven, feed fed fed, catch caught caught, draw drew drawn, grow grew
grown, eat ate eaten, make made made, cut cut cut, spill spilled spilled, write wrote written, read read read, send
sent sent, leave left left, wear wore worn, run ran run, swim swam swum, ride rode ridden, map mapped mapped, dig dug
dug, think thought thought, fly flew flown, get got got, fall fell fallen, come came come, knit knitted knitted, breed
bred bred, trip tripped tripped, pay paid paid, travel travelled travelled, tow towed towed, play played played, stay
stayed stayed
"""

# Ways to go on after the thing: for which verbs (* for all), the slot, the words, and how one asks for it.
ADJUNCTS = """
* | town | in {town} | Where // In which town // In what town // In which place // In what place // In which city
* | town | near {town} | Where // Near which town // Near what town // Near which place
* | spot | in the {spot} // at the {spot} | Where // In which place // In what place // At what place
* | day | on {day} // on {day} evening // on {day} morning | When // On which day // On what day // On which day of the
  week
* | year | in {year} | When // In which year // In what year
* | clock | at {clock} | When // At what time // At which time // At what hour
* | season | in {season} | When // At what time of the year // In which part of the year
* | helper | with {helper} // together with {helper} | With whom // Together with whom
* | client | for {client} | For whom // For which person
* | reason | because {reason} // since {reason} | Why // For what reason // For which reason
* | tool | with {a_tool} // with the help of {a_tool} | With what // With which tool // By what means
sell give send return lend deliver throw show bring read hand donate | client | to {client} | To whom // To which
  person
buy borrow steal order get take receive rent inherit collect | seller | from {seller} | From whom // From which person
buy sell order rent get collect | sum | for {sum} | For how much // For how much money // For what price // At what
  price
repair clean build sew knit write read drive paint wash feed brush design print translate cook bake pick sort cross
  restore | minutes | in {minutes} // within {minutes} | In how many minutes // In what time // In how much time
walk drive fly travel ride move return | ride | by {ride} | How // By what means // In which way
"""

# Facts: of whom or what (p: the person; a class of things, or * for any), the slot asked for, how it is told, how it is
# asked, and how one asks for the person. <x> is a word from LISTS, the same in a whole story; [The] is the thing, [be]
# was or were.
FACTS = """
p | job | {who} was {a_job}. // {who} [worked|earned a living] as {a_job}. // By profession, {who} was {a_job}. // A
  well-known {job}, {who} had many friends. | What was the [job|profession|occupation|work] of {who}? // What did {who}
  do for a living? // [What|Which] job did {who} have? // What was {who} by profession? | Who was {a_job}? // Who
  worked as {a_job}? // Which of them was {a_job}?
p | hobby | {who} [loved|liked|was fond of|enjoyed] {hobby}. // The [hobby|pastime|passion] of {who} was {hobby}. // In
  the evening, {who} relaxed with {hobby}. | What was the [hobby|pastime|passion] of {who}? // What did {who}
  [like|love|enjoy]? // How did {who} relax? | Who [loved|liked|enjoyed] {hobby}? // Whose [hobby|passion] was {hobby}?
p | home | {who} [came|was] from {home}. // {who} grew up in {home}. // The home of {who} was in {home}. // {home} was
  home to {who}. | Where did {who} [come from|grow up]? // Where was {who} from? // Where was the home of {who}? //
  From which town did {who} come? | Who [came|was] from {home}? // Who grew up in {home}?
p | born | {who} was born in {born}. // The year of birth of {who} was {born}. | [When|In which year|In what year] was
  {who} born? // What was the year of birth of {who}? | Who was born in {born}?
p | kin | {kin} was the <kin> of {who}. // The <kin> of {who} was {kin}. // {who} had a <kin> [called|named] {kin}. //
  The <kin> of {who} was called {kin}. | Who was the <kin> of {who}? // What was the name of the <kin> of {who}? //
  What was the <kin> of {who} called? | Whose <kin> was {kin}? // Who had a <kin> [called|named] {kin}? // Who had
  {kin} as a <kin>?
p | pal | {pal} <did> {who}. // {who} was <did> by {pal}. // It was {pal} who <did> {who}. // The person who <did>
  {who} was {pal}. | Who <did> {who}? // By whom was {who} <did>? // Who was it that <did> {who}? // Which person <did>
  {who}? | Who was <did> by {pal}? // Whom did {pal} <do>? // Which of them was <did> by {pal}?
p | pal | {who} <did> {pal}. // {pal} was <did> by {who}. // It was {pal} whom {who} <did>. | Whom did {who} <do>? //
  Who was <did> by {who}? // Who did {who} <do>? // Which person did {who} <do>? | Who <did> {pal}? // By whom was
  {pal} <did>?
p | colour | {who} [wore|was dressed in] {a_colour} <dress>. // The <dress> of {who} was {colour}. // The colour of the
  <dress> of {who} was {colour}. | [What|Which] colour was the <dress> of {who}? // What was the colour of the <dress>
  of {who}? | Who [wore|had] {a_colour} <dress>? // Whose <dress> was {colour}?
p | colour | {who} had {a_colour} <goods>. // The <goods> of {who} was {colour}. // {who} owned {a_colour} <goods>. |
  [What|Which] colour was the <goods> of {who}? // What was the colour of the <goods> of {who}? // [What|Which] colour
  of <goods> did {who} have? | Who had {a_colour} <goods>? // Whose <goods> was {colour}?
p | gear | {who} [took along|packed|was carrying] {a_gear}. // In the bag of {who} was {a_gear}. // {who} never went
  out without {a_gear}. | What did {who} [take along|pack|carry]? // What was in the bag of {who}? // Without what did
  {who} never go out? | Who [took along|packed|carried] {a_gear}? // Who had {a_gear}?
p | meal | {who} [ate|had] {meal} for <lunch>. // For <lunch>, {who} had {meal}. // The <lunch> of {who} was {meal}. |
  What did {who} [eat|have] for <lunch>? // What was the <lunch> of {who}? // What food did {who} have for <lunch>? |
  Who [ate|had] {meal} for <lunch>?
p | number | {who} had {number} <many>. // {who} owned {number} <many>. // The number of <many> that {who} had was
  {number}. | How many <many> did {who} [have|own]? // What was the number of <many> that {who} had? | Who had {number}
  <many>?
p | number | There were {number} guests at the <party> of {who}. // {number} people came to the <party> of {who}. // At
  the <party> of {who}, there were {number} people. | How many [people|guests] [came to|were at] the <party> of {who}?
  | Whose <party> had {number} guests?
p | number | {who} <did> {number} <folk>. // {number} <folk> were <did> by {who}. | How many <folk> [did {who}
  <do>|were <did> by {who}]? // What number of <folk> did {who} <do>? | Who <did> {number} <folk>?
p | number | {number} <folk> <did> {who}. // {who} was <did> by {number} <folk>. | How many <folk> <did> {who}? // By
  how many <folk> was {who} <did>? // What number of <folk> <did> {who}? | Who was <did> by {number} <folk>?
p | pal | {who} gave a <note> to {pal}. // {pal} got a <note> from {who}. // The <note> from {who} was for {pal}. | Who
  got a <note> from {who}? // To whom did {who} give a <note>? // For whom was the <note> from {who}? | Who gave a
  <note> to {pal}? // From whom did {pal} get a <note>?
p | wear | {who} was dressed in {a_wear}. // The clothes of {who} included {a_wear}. // {who} put on {a_wear}. | What
  was {who} dressed in? // What did {who} put on? // What was among the clothes of {who}? | Who put on {a_wear}? // Who
  was dressed in {a_wear}?
p | age | {who} was {age} old. // The age of {who} was {age}. // At that time, {who} was {age} old. | How old was
  {who}? // What was the age of {who}? | Who was {age} old?
p | reason | {who} was <glad> because {reason}. // Because {reason}, {who} was <glad>. // {who} became <glad> because
  {reason}. | Why was {who} <glad>? // For what reason was {who} <glad>? // What made {who} <glad>? | Who was <glad>
  because {reason}?
p | reason | {who} <went> because {reason}. // Because {reason}, {who} <went>. // The reason why {who} <went> was that
  {reason}. | Why did {who} <go>? // For what reason did {who} <go>? // What made {who} <go>? | Who <went> because
  {reason}?
p | hours | {who} <went> after {hours}. // After {hours}, {who} <went>. // It took {hours} before {who} <went>. | After
  how many hours did {who} <go>? // How long was it before {who} <went>? // After what time did {who} <go>? | Who
  <went> after {hours}?
p | hours | {who} <rested> for {hours}. // For {hours}, {who} <rested>. | How long did {who} <rest>? // For how long
  did {who} <rest>? // How many hours did {who} <rest>? // For how many hours did {who} <rest>? | Who <rested> for
  {hours}?
p | minutes | {who} <rested> for {minutes}. // {who} <rested> [exactly|about|almost] {minutes}. | How long did {who}
  <rest>? // How many minutes did {who} <rest>? // For how many minutes did {who} <rest>? | Who <rested> for {minutes}?
p | clock | {who} <went> at {clock}. // At {clock}, {who} <went>. // It was {clock} when {who} <went>. | When did {who}
  <go>? // At what time did {who} <go>? // What time was it when {who} <went>? // At what hour did {who} <go>? | Who
  <went> at {clock}?
p | ride | {who} [went|travelled] home by {ride}. // {who} took {a_ride} home. // On the way home, {who} used {a_ride}.
  | How did {who} [go|get|travel] home? // By what means did {who} [go|get|travel] home? // What did {who} take home? |
  Who [went|travelled] home by {ride}?
p | pay | {who} earned {pay} a <week>. // The wage of {who} was {pay} a <week>. // Every <week>, {who} was paid {pay}.
  | How much did {who} earn [a|every] <week>? // What was the wage of {who}? // How much money did {who} earn? | Who
  earned {pay} a <week>?
p | tongue | {who} spoke {tongue}. // The language of {who} was {tongue}. // {who} was speaking {tongue} all the time.
  | [What|Which] language did {who} speak? // What was the language of {who}? // What did {who} speak? | Who spoke
  {tongue}? // Whose language was {tongue}?
* | colour | [The] [be] {colour}. // The colour of [the] was {colour}. // {who} [liked|wanted] [the] in {colour}. |
  [What|Which] colour [be] [the]? // What was the colour of [the]? |
* | sum | [The] cost {sum}. // {who} paid {sum} for [the]. // The price of [the] was {sum}. // For [the], {who}
  [paid|spent] {sum}. // [The] [be] worth {sum}. | How much did [the] cost? // What did [the] cost? // How much did
  {who} pay for [the]? // What was the price of [the]? // How much [be] [the] worth? | Who paid {sum} for [the]? // Who
  paid {sum}?
* | home | [The] ended up in {home}. // People in {home} can admire [the]. // In the end, [the] came to {home}. | Where
  did [the] end up? // Where can people admire [the]? // In which town did [the] end up?
* | number | {number} <folk> looked after [the]. // A group of {number} <folk> looked after [the]. // [The] needed
  {number} <folk>. | How many <folk> looked after [the]? // How many <folk> did [the] need? // What number of <folk>
  did [the] need?
* | reason | [The] <broke> because {reason}. // Because {reason}, [the] <broke>. // The reason why [the] <broke> was
  that {reason}. | Why did [the] <break>? // What made [the] <break>? // For what reason did [the] <break>?
dog rabbits horse van | reason | [The] <went> because {reason}. // Because {reason}, [the] <went>. | Why did [the]
  <go>? // What made [the] <go>? // For what reason did [the] <go>?
kettle hammer kite van ring dog rabbits apples stamps soup sand rose machine horse | weight | [The] weighed {weight}.
  // The weight of [the] was {weight}. // On the scales, [the] came to {weight}. | How much did [the] weigh? // What
  was the weight of [the]? // How heavy [be] [the]? |
* | spot2 | {who} kept [the] in the {spot2}. // [The] [be] kept in the {spot2}. // In the {spot2}, there [be] room for
  [the]. // After that, [the] stayed in the {spot2}. | Where [be] [the] kept? // Where did {who} keep [the]? // In
  which place did {who} keep [the]? // Where did [the] stay? | Who kept something in the {spot2}?
* | cover | [The] [be] under {a_cover}. // {who} put [the] beside {a_cover}. // Next to [the], there was {a_cover}. //
  Beside [the] stood {a_cover}. | What was near [the]? // What was next to [the]? // Near what [be] [the]? |
* | pal | {pal} <used> [the]. // [The] [be] <used> by {pal}. // It was {pal} who <used> [the]. // The person who <used>
  [the] was {pal}. | Who <used> [the]? // By whom [be] [the] <used>? // Who was it that <used> [the]? // Which person
  <used> [the]? |
* | pal | [The] later went to {pal}. // {pal} got [the] in the end. // {who} left [the] to {pal}. | Who got [the] in
  the end? // To whom did [the] go? // To whom did {who} leave [the]? |
kettle hammer scarf kite van ring letter soup school book picture | maker | {maker} is the maker of [the]. // [The]
  [be] the work of {maker}. // [The] [be] made by {maker}. // {maker} made [the]. | Who made [the]? // Who is the maker
  of [the]? // By whom [be] [the] made? // Whose work [be] [the]? |
kettle hammer kite van scarf ring school | stuff | [The] [be] made of {stuff}. // For [the], {stuff} was used. // The
  material of [the] is {stuff}. | What [be] [the] made of? // [What|Which] material was used for [the]? // Of what [be]
  [the] made? |
kettle hammer kite van scarf ring school | stuff | The <part> of [the] is {stuff}. // [The] has a <part> of {stuff}. |
  What is the <part> of [the] made of? // Of what is the <part> of [the]? // [What|Which] material is the <part> of
  [the]? |
kettle hammer kite van scarf ring letter dog | colour | The <part> of [the] [was|is] {colour}. // [The] [has|had]
  {a_colour} <part>. | [What|Which] colour [was|is] the <part> of [the]? // What is the colour of the <part> of [the]?
  |
kettle hammer van ring school kite | number | [The] had {number} <bits>. // There were {number} <bits> on [the]. //
  [The] came with {number} <bits>. | How many <bits> did [the] have? // How many <bits> were [on|there on] [the]? //
  With how many <bits> did [the] come? |
kettle hammer van ring school | age | [The] is {age} old. // The age of [the] is {age}. | How old is [the]? // What is
  the age of [the]? |
letter book | pages | [The] had {pages}. // There were {pages} in [the]. // {who} filled {pages} of [the]. // [The] ran
  to {pages}. | How many pages [did [the] have|were in [the]|were there in [the]]? // How long was [the]? |
letter book | tongue | [The] was in {tongue}. // The language of [the] is {tongue}. // [The] was written in {tongue}. |
  In [what|which] language was [the]? // [What|Which] language was [the] written in? // What is the language of [the]?
  |
dog | pet | The name of [the] was {pet}. // [The] was called {pet}. // {who} called [the] {pet}. // [The] answered to
  the name of {pet}. | What was the name of [the]? // What did {who} call [the]? // What was [the] called? | Who had
  {a_item} called {pet}?
dog rabbits | feed | [The] ate {feed}. // The favourite food of [the] was {feed}. // {who} gave [the] {feed}. // [The]
  only liked {feed}. | What did [the] eat? // What was the favourite food of [the]? // What did {who} give [the]? //
  What food did [the] like? |
school place | year2 | [The] was finished in {year2}. // [The] dates from {year2}. // The year of [the] is {year2}. |
  [When|In which year] was [the] finished? // From which year does [the] date? // From what year is [the]? |
van horse | miles | [The] went {miles}. // {who} took [the] for {miles}. // The trip with [the] was {miles} long. | How
  far did [the] go? // How many miles did [the] go? // How long was the trip with [the]? |
"""

# A pair has two forms: <did> and <do> are of the same verb.
LISTS = """
kin: sister brother cousin aunt uncle neighbour boss dentist lawyer rival partner landlord tenant friend nephew niece
  grandmother grandfather godmother coach pupil colleague helper assistant secretary driver cook gardener adviser
  manager agent client
did/do: helped/help visited/visit invited/invite phoned/phone followed/follow photographed/photograph
  interviewed/interview thanked/thank praised/praise hired/hire greeted/greet joined/join blamed/blame warned/warn
  advised/advise paid/pay met/meet tested/test rescued/rescue cheered/cheer found/find questioned/question
  replaced/replace admired/admire recognised/recognise supported/support stopped/stop defended/defend trusted/trust
  avoided/avoid
used: used borrowed inspected admired checked photographed moved wrapped examined insured mended repaired noticed
  described praised liked wanted damaged touched ordered delivered labelled tested saved copied sketched brought rented
  polished hid
dress: shirt scarf hat coat dress skirt cap pullover blouse suit apron umbrella shawl uniform belt raincoat
goods: car bicycle house door kitchen sofa suitcase phone garden_gate fence boat bedroom motorbike front_door balcony
  mailbox roof
part: handle lid label box edge bottom lining back front base side top collar cover corner rim seam strap sleeve roof
many: cousins pets books shoes hats brothers sisters plants cups keys pencils coats friends plates teddies bicycles
  chairs clocks
bits: buttons wheels handles holes knobs screws stripes scratches drawers legs dots doors hinges switches lights labels
  stickers
folk: guests children pupils visitors customers tourists voters neighbours drivers readers experts workers soldiers
  dancers
party: party wedding lecture meeting birthday lesson dinner picnic show sale course workshop speech picnic reading
  parade
lunch: lunch breakfast dinner supper dessert brunch
glad: glad sad angry late tired proud worried happy nervous upset surprised early absent pleased annoyed busy ill
  grateful
went/go: came_back/come_back cried/cry laughed/laugh went_home/go_home fell_asleep/fall_asleep moved_house/move_house
  resigned/resign shouted/shout waved/wave called_for_help/call_for_help woke_up/wake_up stood_up/stand_up
  gave_up/give_up changed_seats/change_seats hurried/hurry stayed_away/stay_away took_a_break/take_a_break
  slowed_down/slow_down sat_down/sit_down paid_the_bill/pay_the_bill had_lunch/have_lunch rang_the_bell/ring_the_bell
  locked_the_door/lock_the_door
broke/break: broke/break fell_over/fall_over got_wet/get_wet disappeared/disappear changed/change smelled_bad/smell_bad
  looked_good/look_good drew_attention/draw_attention lost_its_value/lose_its_value had_to_wait/have_to_wait
  got_dirty/get_dirty
note: letter postcard poem cheque message ticket present book medal cake lamp report coin flower bottle key map
rested/rest: rested/rest waited/wait talked/talk danced/dance walked/walk worked/work stood_in_line/stand_in_line
  stayed/stay read/read practised/practise swam/swim argued/argue kept_quiet/keep_quiet spoke/speak sat_there/sit_there
week: week day month year fortnight
"""

# What slots are filled with: the parts of each value, one after the other.
POOLS = """
spot: park museum cinema airport harbour forest stadium cafe hotel zoo library market garage theatre station kitchen
  square shop school palace garden factory tavern office attic cellar gym bakery town_hall playground swimming_pool
  bus_stop car_park castle
day: Monday Tuesday Wednesday Thursday Friday Saturday Sunday
season: early late + spring summer autumn winter
colour: red blue green white grey yellow beige violet scarlet turquoise cream navy_blue dark_red light_green
  pale_yellow crimson
tool: hammer spoon torch ladder brush bucket camera cart magnet map ruler whistle lantern hook stick towel sponge bell
  tray knife
reason: the_bus a_cousin the_shop the_boss the_river the_lift a_guest the_music the_lamp the_price the_cat the_roof
  a_child the_radio the_soup the_clock the_bridge the_plan a_letter the_road the_bank the_garden the_heating an_uncle
  the_judge the_show the_garage the_window the_key a_neighbour the_school a_horse + was_late was_gone had_changed
  looked_odd was_missing was_old had_stopped made_no_sense was_new was_in_danger needed_help was_too_small
  had_come_back was_far_away could_wait was_famous was_lost
job: baker nurse tailor plumber teacher farmer driver editor judge barber dentist carpenter waiter lawyer engineer
  florist butcher pilot chemist cook gardener librarian mechanic painter poet porter printer salesman soldier vet
  writer cashier detective optician potter clown referee accountant astronomer banker blacksmith cleaner clerk
  consultant dancer electrician firefighter guard hunter
hobby: chess tennis football knitting fishing dancing poetry cycling swimming gardening cooking judo skating rowing
  pottery archery golf yoga baking running singing astronomy hiking boxing carpentry photography billiards bowling
  origami surfing skiing hockey
gear: map umbrella lunch_box torch whistle camera newspaper magazine bottle pencil purse ticket passport cushion towel
  sandwich battery ladder wallet thermos mirror kite hairbrush magnet hammer radio key helmet lantern spoon penknife
  basket apple
meal: soup rice pasta salad bread cheese toast pancakes fish noodles eggs curry stew porridge beans yoghurt sausages
  pizza cake fruit pickles dumplings muesli bacon potatoes waffles chips burgers ham lentils sushi tacos
ride: train bus plane taxi tram coach van jeep truck lorry bicycle scooter motorbike canoe cab underground_train
  minibus horse cart
wear: shirt scarf hat coat dress skirt cap pullover blouse suit apron shawl belt raincoat kimono poncho ribbon helmet
  cardigan
tongue: French German Spanish Greek Latin Polish Dutch Danish Russian Arabic Turkish Hindi Thai Welsh Czech Irish
  Swahili Basque
stuff: wood brick marble clay paper stone wax tin iron brass timber concrete granite straw felt bronze wire pine oak
  cork
cover: bench sofa table bush rug fence wall chair box tree bridge lamp bed shelf sign fountain statue stone hedge
  cupboard desk
feed: oats bread cheese lettuce corn rice clover bananas fish seeds carrots hay grass apples cabbage beetles nuts
  barley eggs peas
pet: Biscuit Pepper Shadow Button Muffin Rusty Patch Ginger Bubbles Socks Pickle Domino Cookie Tiger Bingo Nugget
  Snowball Bandit
topic: dragons rivers trains bees pirates volcanoes castles robots knights planets ghosts farming clouds spiders kings
  bread stars dinosaurs wizards windmills comets clocks gardens elephants tunnels bridges deserts witches soldiers soup
  mushrooms football earthquakes giants tigers whales cowboys caves lions mermaids roses machines dolls buses storms
  lakes monkeys trees kites
adjective: old small broken wooden new large heavy light strange cheap plain round shiny dusty
title: Golden Blue Happy Little Red Wild Royal Crooked Hungry Sleepy Green Dancing Flying Merry Quiet Crazy Noble White
  Jolly Green Clever Iron Velvet Rolling Honest Rusty Busy Secret + Spoon Lion Apple Moon Garden Arrow Bell Parrot
  Kettle Duck Rose Comet Goose Barrel Bear Lantern Pony Crown Bridge Anchor Hat Button Onion Castle Thunder Ladder
  Mountain Fountain Elephant Cloud Tiger
town: Brack Wend Hol Mar Ash Nor Till Crom Del Farn Grim Lang Pem Stan Wal Red Bal Cald Dorn Ester Fen Glen Hart Ingle
  Kel Lorn Mont Nether Pas Rav Sand Tam Wick Bru Calo Dena Fari Goro Kass Lumo Mira Nava Pola Rima Sora Tresa Varo Zema
  Kopa Dubo + ford ton bury field ham wick mouth dale well by burgh vik lund sk polis ville nova grad stad rona lia ria
  ka mora tello bach
surname: Bar Cor Den Fal Gor Hal Kel Mor Pal Ros Tam Ver Ban Cal Dor Fen Gil Har Jen Kos Lar Mel Nor Per Rad Sal Tor
  Vin Wal Zim Bel Dun Fos Gra Hol Kra Mak Pet Schu Sto Tre + sen man elli ova ner dez kin aki more sky ton ley son ford
  wood well ward berry field ski vic escu ides oglu ian ura uchi eau
first: Ba Be Bo Da De Do Fa Fi Ga Go Ha Hi Ja Jo Ka Ke Ko La Le Li Lo Ma Me Mi Mo Na Ne Ni No Pa Pe Po Ra Re Ri Ro Sa
  Se Si So Ta Te Ti To Va Ve Vi Wa We Ya Yo Za Ze Zo Bra Cla Dra Fre Gri Kri Pri Sta Tru Sha Che Thi Al An Ar El En Er
  In Is Ol Or Ul Um + b d f g k l m n r s t v z br dr ld lm mb nd ng nn rd rl rn ss st th tt v x z + a e i o u an ar el
  en er es ia ie il in io is ka la li lo na ne on or ra ri ro ta us y
"""

# Numbers that training may meet: the held-out half has 60 to 99, and years from 1950 on.
NUMBERS = """
count | 2-59 100-400
number | 2-59 100-900
year year2 | 1700-1949 1500-1949
born | 1800-1949 1700-1949
sum pay | 5-59 100-999 | dollars dollars pounds euros
pages | 8-59 100-999 | pages
minutes | 5-59 5-59 | minutes
hours | 2-59 2-59 | hours
miles | 5-59 100-999 | miles
weight | 3-59 100-400 | kilos pounds grams
age | 3-59 3-59 | years months weeks
"""
