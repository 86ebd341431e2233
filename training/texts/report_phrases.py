"""Openings, facts, decoys and words of `composed_reports`: pure data, disjoint from the held-out `report_templates`."""

# How reports begin, by kind of event, and how their summaries do; + is where a number of people or things goes.
# <x> is a word from WORDS, {x} is filled in by `reports`.
OPENINGS = """
<A_place> has <closed> in {t}. // In {t}, <a_place> <closed>. // <A_place> <closed> in {t}. // It was in {t} that
  <a_place> <closed>. // People in {t} saw how <a_place> <closed>. | <A_place> + <closed> in {t}
The <place> in {t} has <closed>. // The <place> of {t} <closed>. // News from {t}: the <place> <closed>. // In {t}, the
  <place> <closed>. | The <place> in {t} <closed> +
{t} has a new <place>. // A new <place> can be found in {t}. // In {t}, there is now a new <place>. // The people of
  {t} can use a new <place>. // A new <place> opened in {t}. | A new <place> opened in {t} +
<A_fest> took place in {t}. // {t} was the scene of <a_fest>. // People met in {t} for <a_fest>. // In {t}, <a_fest>
  was held. // <A_fest> has ended in {t}. // <A_fest> in {t} is over. | <A_fest> took place in {t} +
<A_fest> in {t} was called off. // There will be no <fest> in {t}. // {t} has called off its <fest>. // Plans for
  <a_fest> in {t} were dropped. | <A_fest> in {t} was called off +
<A_harm> damaged <a_place> in {t}. // In {t}, <a_place> was damaged by <a_harm>. // <A_place> in {t} was hit by
  <a_harm>. // There was <a_harm> at <a_place> in {t}. | <A_harm> damaged <a_place> in {t} +
<A_ride> from {t} to {u} <stopped>. // On its way from {t} to {u}, <a_ride> <stopped>. // The <ride> between {t} and
  {u} <stopped>. // <A_ride> that had left {t} for {u} <stopped>. // The <ride> to {u} left {t} and then <stopped>. |
  <A_ride> from {t} to {u} + <stopped>
<Boss> {p} has <made> <a_work> in {t}. // In {t}, <boss> {p} <made> <a_work>. // <A_work> was <made> by <boss> {p} in
  {t}. // {t} was where <boss> {p} <made> <a_work>. // It was <boss> {p} who <made> <a_work> in {t}. | <Boss> {p}
  <made> <a_work> in {t} +
{p} won <a_contest> in {t}. // The winner of <a_contest> in {t} is {p}. // In {t}, {p} came first in <a_contest>. //
  <A_contest> in {t} ended with a win for {p}. // Nobody in {t} could beat {p} in <a_contest>. | {p} won <a_contest> in
  {t} +
{s} <Trade> has <made> <a_place> in {t}. // In {t}, {s} <Trade> <made> <a_place>. // <A_place> in {t} was <made> by {s}
  <Trade>. // The firm {s} <Trade> <made> <a_place> in {t}. | {s} <Trade> <made> <a_place> in {t} +
{s} <Trade> will <make> <a_place> in {t}. // {t} will get <a_place> from {s} <Trade>. // <A_place> in {t} is planned by
  {s} <Trade>. // In {t}, {s} <Trade> is going to <make> <a_place>. | {s} <Trade> will <make> <a_place> in {t} +
Talks between {s} <Trade> and {t} have <ended>. // {t} has been talking with {s} <Trade>, and the talks <ended>. // The
  talks of {s} <Trade> with {t} <ended>. | Talks between {s} <Trade> and {t} <ended> +
Workers found {c} in {t}. // In {t}, {c} came to light. // {c} came to light in {t}. // Those who dug in {t} found {c}.
  | Workers found {c} in {t} +
The <council> of {t} decided on {c}. // {c} will come to {t}, the <council> said. // The <council> in {t} wants {c}. //
  In {t}, the <council> voted for {c}. | The <council> of {t} voted for {c} +
{c} went missing in {t}. // In {t}, {c} disappeared. // Nobody in {t} knows what became of {c}. // Thieves in {t} took
  {c}. | {c} disappeared in {t} +
<A_fest> about {c} was held in {t}. // In {t}, {c} had <a_fest> to themselves. // {c} were the subject of <a_fest> in
  {t}. // {t} held <a_fest> about {c}. | {t} held <a_fest> about {c} +
{t} beat {u} in the <cup>. // In the <cup>, {u} lost to {t}. // The <cup> between {t} and {u} went to {t}. // {u} had
  no chance against {t} in the <cup>. | {t} beat {u} in the <cup> +
The <place> in {t} has added <a_room>. // <A_room> was added to the <place> in {t}. // In {t}, the <place> was given
  <a_room>. // For the <place> in {t}, there is <a_room> at last. | The <place> in {t} added <a_room> +
<Boss> {p} received <a_medal> in {t}. // <A_medal> for <boss> {p} was waiting in {t}. // In {t}, <boss> {p} was given
  <a_medal>. // {t} has honoured <boss> {p} with <a_medal>. | <Boss> {p} received <a_medal> in {t} +
{t} and {u} now share <a_place>. // <A_place> will serve both {t} and {u}. // {u} has joined {t} in running <a_place>.
  | {t} and {u} share <a_place> +
<Folk> from {t} have <made> <a_work>. // In {t}, <folk> have <made> <a_work>. // <A_work> was <made> by <folk> in {t}. |
  <Folk> in {t} <made> <a_work> +
The <place> of {s} <Trade> in {t} has <closed>. // In {t}, the <place> of {s} <Trade> <closed>. // {s} <Trade> has
  <a_place> in {t}, and it <closed>. | The <place> of {s} <Trade> in {t} <closed> +
<Boss> {p} has left {s} <Trade> in {t}. // {s} <Trade> in {t} has lost <boss> {p}. // In {t}, <boss> {p} said
  goodbye to {s} <Trade>. | <Boss> {p} left {s} <Trade> in {t} +
{p} is the new <boss> of {s} <Trade> in {t}. // {s} <Trade> in {t} has a new <boss>, {p}. // In {t}, {s} <Trade> chose
  {p} as its <boss>. | {p} became <boss> of {s} <Trade> in {t} +
{t} has named <a_place> after {p}. // <A_place> in {t} now bears the name of {p}. // In {t}, <a_place> was named after
  {p}. | {t} named <a_place> after {p} +
<Folk> at {s} <Trade> in {t} ask for <a_room>. // In {t}, <folk> at {s} <Trade> want <a_room>. // <A_room> is what
  <folk> at {s} <Trade> in {t} ask for. | <Folk> at {s} <Trade> in {t} asked for <a_room> +
<A_ride> from {t} hit <a_place> in {u}. // In {u}, <a_place> was hit by <a_ride> from {t}. // <A_place> in {u} got in
  the way of <a_ride> from {t}. | <A_ride> from {t} hit <a_place> in {u} +
{s} <Trade> has moved from {t} to {u}. // {s} <Trade> gave up {t} and went to {u}. // {u} is the new home of {s}
  <Trade>, once of {t}. | {s} <Trade> moved from {t} to {u} +
<Folk> met the <council> in {t}. // In {t}, <folk> came together with the <council>. // {t} brought <folk> and the
  <council> together. | <Folk> met the <council> in {t} +
<Boss> {p} has found {c} in {t}. // In {t}, <boss> {p} came upon {c}. // {c} were found by <boss> {p} in {t}. | <Boss>
  {p} found {c} in {t} +
The price of {c} has doubled in {t}. // In {t}, {c} cost twice as much now. // {t} pays twice as much for {c}. | The
  price of {c} doubled in {t} +
<Boss> {p} spoke to <folk> in {t} about {c}. // In {t}, <folk> heard <boss> {p} speak about {c}. // {c} were what <boss>
  {p} told <folk> in {t} about. | <Boss> {p} spoke about {c} to <folk> in {t} +
{s} <Trade> lent {c} to {t}. // {t} may use {c} of {s} <Trade>. // {c} in {t} come from {s} <Trade>. | {s} <Trade> lent
  {c} to {t} +
A school in {t} has <made> <a_work> about {c}. // About {c} is <a_work> by a school in {t}. // In {t}, a school <made>
  <a_work> about {c}. | A school in {t} <made> <a_work> about {c} +
"""

# What counts and stands in the first sentence of the summary: how it is told, and what becomes of it.
FIRST = """
c | The subject was {c}. // It was all about {c}. // At the centre of it were {c}. // It dealt with {c} in the end. |
  about {c}
n | There were {n} <units> in total. // In all there were {n} <units>. // The final count was {n} <units>. // In the
  end it was {n} <units>. // The final number is {n} <units>. // A total of {n} <units> was counted. // All in all, {n}
  <units> belonged to it. | with {n} <units>
n | It took {n} <days> in total. // In the end {n} <days> were needed. // It was over after {n} <days> in all. // The
  final length was {n} <days>. // All in all it went on for {n} <days>. // It had lasted {n} <days> when it finally
  ended. | after {n} <days>
n | The final sum was {n} <money>. // In total {n} <money> changed hands. // In the end {n} <money> were paid. // It
  was worth {n} <money> in all. // The total value came to {n} <money>. | for {n} <money>
r | The reason was {r}. // It happened because of {r}. // {r} was the reason. // The reason, people agree, is {r}. //
  It was put down to {r}. // <Experts> named {r} as the reason. // <Experts> are sure that it was because of {r}. //
  What led to it was {r}. | because of {r}
r | The cause was {r}. // It was caused by {r}. // {r} was the cause. // <Experts> found {r} to be the cause. // The
  trouble came from {r}. // <Experts> traced it to {r}. | because of {r}
"""

# What counts and stands in the second sentence, much as it is told; ~ is "in total" or the like, which is left out.
# It is about a person, a number, both (x), or something else (d).
SECOND = """
p | <Boss2> {p} <led> the <task>. // The <task> was <led> by <boss2> {p}. // It was <boss2> {p} who <led> the <task>.
  // ~ <boss2> {p} <led> the <task>.
p | <Boss2> {p} is in charge of the <task>. // In charge of the <task> is <boss2> {p}. // The <task> is in the hands of
  <boss2> {p}. // <Boss2> {p} leads the <task>.
p | <Boss2> {p} will <make> <a_place2> next. // It was <boss2> {p} who <made> <a_place2>. // <A_place2> was <made> by
  <boss2> {p}.
p | The <boss2> of the <group> is {p}. // {p} is the <boss2> of the <group>. // The <group> has {p} as its <boss2>.
p | The best <job2> was {p}. // {p} was the best <job2>. // It was {p} who was the best <job2>.
x | <Boss2> {p} <gained> {m} <units2> ~. // ~ {m} <units2> were <gained> by <boss2> {p}. // It was <boss2> {p} who
  <gained> {m} <units2>.
x | <Boss2> {p} was ready after {m} <days2>. // It took <boss2> {p} {m} <days2> to be ready. // ~ <boss2> {p} was ready
  after {m} <days2>.
m | ~ the <group> <gained> {m} <units2>. // ~ {m} <units2> were <gained> by the <group>. // The <group> <gained> {m}
  <units2> ~.
m | ~ {m} <folk> came. // {m} <folk> came ~. // The number of <folk> was {m} ~. // ~ there were {m} <folk>.
m | ~ it cost {m} <money2>. // It cost {m} <money2> ~. // ~ the <group> paid {m} <money2>. // The <task> cost {m}
  <money2> ~.
m | The <group> will <make> {m} <units2>. // {m} <units2> will be <made> by the <group>. // ~ the <group> will <make>
  {m} <units2>.
d | The <task> will deal with {d}. // The subject of the <task> is {d}. // The money will pay for {d}. // ~ all of it
  will go to {d}.
d | The worst hit was {d}. // ~ the worst hit was {d}. // The <group> chose {d} ~. // ~ the <group> settled on {d}. //
  The prize is {d}.
"""

# What does not count, by the slot whose value it might be mistaken for.
DECOYS = """
n | Last year there were {N} <thing>. // A year ago it was {N} <thing>. // Some had expected {N} <thing>. // At first
  people spoke of {N} <thing>. // The former number was {N}. // Two years earlier, it had been {N} <thing>. // In the
  past it was {N} <thing>. // A rumour of {N} <thing> was wrong. // An early guess was {N} <thing>. // Elsewhere it was
  {N} <thing>. // At first {N} <thing> seemed enough.
m | Last year it was {M} <thing2>. // The <group> had hoped for {M} <thing2>. // At first {M} <thing2> were expected.
  // A year ago the <group> <gained> {M} <thing2>. // The former figure was {M}. // Some had expected {M} <thing2>. //
  Earlier, it had been {M} <thing2>.
r | At first {R} was blamed. // Some had suspected {R}. // Nobody blamed {R}. // Many had thought of {R}. // A rumour
  about {R} was wrong. // Last year it was {R}. // For a while, <experts> had suspected {R}. // Others still talk about
  {R}. // Some <folk> had expected {R}.
c | Nobody asked for {C}. // Last year it was {C}. // Nobody spoke of {C}. // Many would have liked {C} more. // Plans
  for {C} were dropped long ago.
d | Nobody spoke of {D}. // Earlier it had been {D}. // Next year it may be {D}. // Some had asked for {D}. // At first
  {D} had been named.
t | The road to {T} stayed open. // Nothing like it is known from {T}. // Guests from {T} left early. // {T} had
  something like it a year ago. // A bus from {T} came too late. // Things went on as usual in {T}. // In {T}, people
  only read about it. // Some <folk> had come from {T}.
p | <Boss3> {P} <idled>. // The former <boss2> was {P}. // {P} <idled>. // {P}, <a_job>, <idled>. // Last year, {P} had
  been the <boss2>. // <A_job> named {P} <idled>. // <Boss3> {P} had no time to come. // Some had hoped to see {P} as
  <boss2>. // {Q} <idled> and then went home.
s | {S} <Trade2> had no part in it. // A year ago, {S} <Trade2> was the first to try. // {S} <Trade2> is a rival. //
  Others buy from {S} <Trade2>.
"""

# Sentences that fit any event.
FILLERS = """
{a} <idled>. // {a} from {b} <idled>. // {a}, <a_job>, <idled>. // In {b}, nobody took notice. // {k} <folk>
  <idled_too>. // <A_job> from {b} <idled>. // Some <folk> <idled_too>. // A few <folk> <idled_too>. // The <folk>
  <idled_too>. // The weather was <fine>. // The streets were <fine>. // The mood was <fine>. // The food was <fine>.
  // Everything was <fine> afterwards. // The rooms were <fine>. // The music was <fine>. // {a} thought it was <fine>.
  // {a} lives in {b} with {k} <units>. // {a} is <a_job>. // <A_ride> was parked outside. // {k} <units> stood along
  the road. // The <place> next door was <fine>. // It rained for {k} minutes. // {a} has been <a_job> for {k} years.
"""

WORDS = """
place: school bridge park theatre factory swimming_pool station playground zoo cinema stadium clinic bakery gym tower
  garden airport tunnel market museum library restaurant nursery bookshop windmill dam power_plant youth_club car_park
  lift fountain observatory concert_hall bus_station ice_rink petting_zoo skate_park warehouse castle chapel dairy_farm
  petrol_station cable_car tram_line
closed: closed opened moved collapsed burned_down reopened changed_hands failed reached_its_goal turned_ten shut_down
  caught_fire doubled_its_prices flooded stopped_work made_a_profit lost_its_roof
stopped: broke_down got_lost stopped landed_early had_to_wait ran_out_of_fuel was_held_up lost_a_wheel came_too_late
  was_sent_home
room: cinema swimming_pool reading_room kitchen roof_garden winter_garden dance_floor ticket_hall lift cafe
  training_room playroom laboratory bicycle_shed map_room chess_room sauna stage wine_cellar sports_hall car_park
  bakery tower
medal: medal certificate letter_of_thanks cup title silver_key degree pension scholarship ribbon
  garden_party
fest: festival fair auction meeting wedding parade congress protest exhibition dance picnic race course lecture debate
  trade_show trial conference carnival reading opening book_fair training_camp summer_school quiz flea_market
  memorial_service open_day
harm: fire flood storm explosion landslide burglary lightning_strike leak power_cut hailstorm gas_leak crash frost
  wild_boar
ride: bus train plane coach tram lorry balloon taxi tractor school_bus freight_train van cable_car rowing_boat barge
  helicopter sleigh river_boat tanker delivery_van camper circus_wagon fire_engine convoy
boss: engineer architect writer painter cook scientist trainer gardener officer judge singer farmer teacher minister
  builder chairman president manager secretary pilot chemist historian conductor dancer designer editor professor
  detective coach priest inventor bishop sergeant mayor headmaster foreman curator producer sculptor
made/make: built/build bought/buy opened/open designed/design sold/sell repaired/repair planned/plan closed/close
  tested/test saved/save founded/found rebuilt/rebuild moved/move rented/rent cleaned/clean finished/finish
  started/start restored/restore presented/present
work: novel play song garden mural clock opera tunnel robot engine bridge dictionary chapel statue museum map cookbook
  musical documentary comic ballet mosaic school windmill telescope_hall glasshouse radio_show board_game
contest: chess_tournament cooking_contest cycling_race poetry_contest dog_show photo_contest marathon quiz ski_race
  tennis_final rowing_race singing_contest spelling_contest pie_contest design_contest dance_contest judo_cup
  swimming_race sailing_cup
trade: Foods Motors Paper Glass Textiles Tools Paints Shoes Toys Furniture Bakeries Energy Railways Fashion Flowers
  Lamps Tyres Carpets Watches Bicycles Insurance Software Hotels Chemicals Breweries Kitchens Pumps Phones Seeds Press
ended: ended failed started_again led_nowhere succeeded stopped collapsed continued
council: council parliament board school_board committee town_hall assembly
cup: cup final league semi-final derby youth_cup play-off hockey_final
units: seats rooms trees shops houses trucks boats books tables animals windows lamps machines computers bicycles flats
  stalls boxes cows bags pictures lessons letters songs goals points medals orders parcels votes offers signatures
  prizes workers pupils
folk: visitors guests runners pupils experts fans volunteers customers families tourists readers soldiers neighbours
  singers players children students walkers farmers shoppers officers drivers
days: days hours weeks minutes months nights
money: dollars thousand_dollars million_dollars euros pounds thousand_euros
experts: engineers experts officers teachers witnesses neighbours doctors scientists farmers firefighters inspectors
  managers lawyers
group: jury team firm committee club family union board choir class owner office school staff town ministry court club
  police
gained: gained sold bought collected checked read won lost made saved received counted ordered moved planted repaired
  promised kept
led: led directed planned organised supervised designed checked started prepared carried_out paid_for watched_over
  finished
task: work project plan show event search operation programme team campaign repair visit celebration cleaning hunt
  planning
idled: took_a_few_pictures drank_lemonade waited_outside sold_balloons missed_the_bus sang_an_old_song lost_a_glove
  waved_to_friends fell_asleep told_a_joke brought_sandwiches walked_the_dog forgot_an_umbrella read_a_newspaper
  carried_the_chairs made_coffee wore_a_new_hat asked_a_question left_early stayed_at_home parked_the_car baked_a_cake
  watched_from_a_window wrote_a_postcard played_cards found_a_coin phoned_a_cousin cleaned_the_windows looked_tired
  gave_out_leaflets fed_the_ducks took_a_taxi laughed_a_lot repaired_a_bicycle said_nothing bought_an_ice_cream
  climbed_a_tree held_the_door
idled_too: waited_outside sang drank_lemonade looked_on laughed went_home stayed_for_hours asked_questions ate_soup
  took_pictures clapped talked_about_football came_by_train left_early looked_for_a_seat shared_their_lunch
job: baker nurse tailor plumber farmer driver editor barber dentist carpenter waiter lawyer florist butcher cashier
  mechanic pupil librarian potter clown referee student neighbour postman fisherman optician tourist cleaner reporter
  policeman
fine: good bad quiet busy clean empty full loud cold warm pleasant strange lively dull bright wet dry normal excellent
  colourful
adjective: broken missing late rusty frozen wrong new cheap hidden noisy stolen faulty cracked old heavy strange empty
  huge painted dirty wild secret careless unpaid forgotten blocked burnt useless burning ancient rare wooden yellow
  tired
noun: signal valve bridge wall key letter gate pump cable fence tree clock wheel lorry pipe road roof door plan law map
  dog stone bell rumour contract machine tractor engine window ladder oven statue vase coin garden goat barrel lamp
  book lock mirror basket
plural: bills parts wires prices neighbours roads rules potatoes plans tyres workers bees mice coins maps toys stamps
  birds tiles songs letters wishes orders delays tickets taxes promises vases keys clocks drains leaves
"""
