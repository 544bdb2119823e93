"""Word tables of the built-in English-German corpus.

Columns are separated by `|`, the forms of a word by spaces. `_` is a space inside a form.
"""

import functools

Row = list[list[str]]  # columns, each a list of forms


class Table(list[Row]):
    """Rows of words, hashed by identity."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    @functools.cache  # noqa: B019  # tables are constants
    def rows_with(self, column: int, *classes: str) -> list[Row]:
        """Return the rows with at least one of the classes in a column."""
        return [row for row in self if set(row[column]) & set(classes)]


def parse(text: str) -> Table:
    lines = text.strip().splitlines()
    return Table(
        [[[form.replace("_", " ") for form in column.split()] for column in line.split("|")] for line in lines]
    )


# English singular, plural | German singular, plural | gender (m, f, n; with w: weak, -n/-en except in the nominative) |
# semantic classes, which verbs, adjectives and prepositions select
NOUNS = parse("""
man men|Mann Männer|m|person
woman women|Frau Frauen|f|person
child children|Kind Kinder|n|person
boy boys|Junge Jungen|mw|person
girl girls|Mädchen Mädchen|n|person
teacher teachers|Lehrer Lehrer|m|person
doctor doctors|Arzt Ärzte|m|person
nurse nurses|Krankenschwester Krankenschwestern|f|person
farmer farmers|Bauer Bauern|mw|person
baker bakers|Bäcker Bäcker|m|person
neighbour neighbours|Nachbar Nachbarn|mw|person
aunt aunts|Tante Tanten|f|person
uncle uncles|Onkel Onkel|m|person
brother brothers|Bruder Brüder|m|person
sister sisters|Schwester Schwestern|f|person
grandmother grandmothers|Großmutter Großmütter|f|person
grandfather grandfathers|Großvater Großväter|m|person
daughter daughters|Tochter Töchter|f|person
son sons|Sohn Söhne|m|person
friend friends|Freund Freunde|m|person
student students|Student Studenten|mw|person
singer singers|Sängerin Sängerinnen|f|person
cook cooks|Koch Köche|m|person
painter painters|Maler Maler|m|person
queen queens|Königin Königinnen|f|person
king kings|König Könige|m|person
guest guests|Gast Gäste|m|person
driver drivers|Fahrer Fahrer|m|person
policeman policemen|Polizist Polizisten|mw|person
journalist journalists|Journalistin Journalistinnen|f|person
engineer engineers|Ingenieur Ingenieure|m|person
lawyer lawyers|Anwältin Anwältinnen|f|person
dog dogs|Hund Hunde|m|animal pet
cat cats|Katze Katzen|f|animal pet
horse horses|Pferd Pferde|n|animal pet
cow cows|Kuh Kühe|f|animal pet
bird birds|Vogel Vögel|m|animal
mouse mice|Maus Mäuse|f|animal
pig pigs|Schwein Schweine|n|animal pet
duck ducks|Ente Enten|f|animal pet
hen hens|Huhn Hühner|n|animal pet
bear bears|Bär Bären|mw|animal
wolf wolves|Wolf Wölfe|m|animal
fox foxes|Fuchs Füchse|m|animal
rabbit rabbits|Kaninchen Kaninchen|n|animal pet
lion lions|Löwe Löwen|mw|animal
monkey monkeys|Affe Affen|mw|animal
goat goats|Ziege Ziegen|f|animal pet
snake snakes|Schlange Schlangen|f|animal
frog frogs|Frosch Frösche|m|animal
donkey donkeys|Esel Esel|m|animal pet
lamb lambs|Lamm Lämmer|n|animal pet
squirrel squirrels|Eichhörnchen Eichhörnchen|n|animal
book books|Buch Bücher|n|thing text
letter letters|Brief Briefe|m|thing text openable
newspaper newspapers|Zeitung Zeitungen|f|thing text
map maps|Karte Karten|f|thing text
notebook notebooks|Heft Hefte|n|thing text
ball balls|Ball Bälle|m|thing
picture pictures|Bild Bilder|n|thing
key keys|Schlüssel Schlüssel|m|thing
bag bags|Tasche Taschen|f|thing openable
cup cups|Tasse Tassen|f|thing fragile
bottle bottles|Flasche Flaschen|f|thing fragile openable
lamp lamps|Lampe Lampen|f|thing machine fragile
knife knives|Messer Messer|n|thing
spoon spoons|Löffel Löffel|m|thing
fork forks|Gabel Gabeln|f|thing
glass glasses|Glas Gläser|n|thing fragile
plate plates|Teller Teller|m|thing fragile
coat coats|Mantel Mäntel|m|thing clothing
shirt shirts|Hemd Hemden|n|thing clothing
hat hats|Hut Hüte|m|thing clothing
shoe shoes|Schuh Schuhe|m|thing clothing
skirt skirts|Rock Röcke|m|thing clothing
dress dresses|Kleid Kleider|n|thing clothing
watch watches|Uhr Uhren|f|thing machine
telephone telephones|Telefon Telefone|n|thing machine
computer computers|Computer Computer|m|thing machine
camera cameras|Kamera Kameras|f|thing machine
bicycle bicycles|Fahrrad Fahrräder|n|thing machine
car cars|Auto Autos|n|thing machine
guitar guitars|Gitarre Gitarren|f|thing
suitcase suitcases|Koffer Koffer|m|thing openable
umbrella umbrellas|Regenschirm Regenschirme|m|thing openable
box boxes|Kiste Kisten|f|thing openable
flower flowers|Blume Blumen|f|thing
present presents|Geschenk Geschenke|n|thing openable
doll dolls|Puppe Puppen|f|thing
coin coins|Münze Münzen|f|thing
ring rings|Ring Ringe|m|thing
pen pens|Stift Stifte|m|thing
blanket blankets|Decke Decken|f|thing
pillow pillows|Kissen Kissen|n|thing
candle candles|Kerze Kerzen|f|thing
basket baskets|Korb Körbe|m|thing
apple apples|Apfel Äpfel|m|food
cake cakes|Kuchen Kuchen|m|food baked
roll rolls|Brötchen Brötchen|n|food baked
cookie cookies|Keks Kekse|m|food baked
pancake pancakes|Pfannkuchen Pfannkuchen|m|food baked
egg eggs|Ei Eier|n|food cooked
potato potatoes|Kartoffel Kartoffeln|f|food cooked
carrot carrots|Karotte Karotten|f|food cooked
soup soups|Suppe Suppen|f|food cooked
sausage sausages|Wurst Würste|f|food cooked
mushroom mushrooms|Pilz Pilze|m|food cooked
pear pears|Birne Birnen|f|food
banana bananas|Banane Bananen|f|food
cherry cherries|Kirsche Kirschen|f|food
tomato tomatoes|Tomate Tomaten|f|food
lemon lemons|Zitrone Zitronen|f|food
strawberry strawberries|Erdbeere Erdbeeren|f|food
nut nuts|Nuss Nüsse|f|food
salad salads|Salat Salate|m|food
garden gardens|Garten Gärten|m|room
house houses|Haus Häuser|n|room building
kitchen kitchens|Küche Küchen|f|room
school schools|Schule Schulen|f|room building
park parks|Park Parks|m|room
forest forests|Wald Wälder|m|room
city cities|Stadt Städte|f|room
church churches|Kirche Kirchen|f|room building
hotel hotels|Hotel Hotels|n|room building
museum museums|Museum Museen|n|room building
library libraries|Bibliothek Bibliotheken|f|room building
office offices|Büro Büros|n|room
village villages|Dorf Dörfer|n|room
castle castles|Schloss Schlösser|n|room building
cellar cellars|Keller Keller|m|room
theatre theatres|Theater Theater|n|room building
hospital hospitals|Krankenhaus Krankenhäuser|n|room building
shop shops|Laden Läden|m|room building
factory factories|Fabrik Fabriken|f|room building
barn barns|Scheune Scheunen|f|room building
tent tents|Zelt Zelte|n|room
cave caves|Höhle Höhlen|f|room
table tables|Tisch Tische|m|surface
bed beds|Bett Betten|n|surface
sofa sofas|Sofa Sofas|n|surface
chair chairs|Stuhl Stühle|m|surface
shelf shelves|Regal Regale|n|surface
roof roofs|Dach Dächer|n|surface
bench benches|Bank Bänke|f|surface
bridge bridges|Brücke Brücken|f|surface
hill hills|Hügel Hügel|m|surface
carpet carpets|Teppich Teppiche|m|surface
door doors|Tür Türen|f|openable
window windows|Fenster Fenster|n|openable
cupboard cupboards|Schrank Schränke|m|openable
""")

# English base, third person, past | German infinitive (separable prefix before a +), third person, participle |
# auxiliary (h: haben, s: sein) | frame | classes of subjects | classes of objects
# Frames: intransitive, transitive, dative, ditransitive, motion (into, onto), placement (in, on, under)
VERBS = parse("""
sleep sleeps slept|schlafen schläft geschlafen|h|intransitive|person animal|
laugh laughs laughed|lachen lacht gelacht|h|intransitive|person|
cry cries cried|weinen weint geweint|h|intransitive|person|
dance dances danced|tanzen tanzt getanzt|h|intransitive|person animal|
sing sings sang|singen singt gesungen|h|intransitive|person|
work works worked|arbeiten arbeitet gearbeitet|h|intransitive|person|
play plays played|spielen spielt gespielt|h|intransitive|person animal|
wait waits waited|warten wartet gewartet|h|intransitive|person animal|
smile smiles smiled|lächeln lächelt gelächelt|h|intransitive|person|
whisper whispers whispered|flüstern flüstert geflüstert|h|intransitive|person|
live lives lived|leben lebt gelebt|h|intransitive|person animal|
sit sits sat|sitzen sitzt gesessen|h|intransitive|person animal|
stand stands stood|stehen steht gestanden|h|intransitive|person animal|
swim swims swam|schwimmen schwimmt geschwommen|s|intransitive|person animal|
get_up gets_up got_up|auf+stehen steht aufgestanden|s|intransitive|person animal|
wake_up wakes_up woke_up|auf+wachen wacht aufgewacht|s|intransitive|person animal|
fall_asleep falls_asleep fell_asleep|ein+schlafen schläft eingeschlafen|s|intransitive|person animal|
arrive arrives arrived|an+kommen kommt angekommen|s|intransitive|person|
come_back comes_back came_back|zurück+kommen kommt zurückgekommen|s|intransitive|person animal|
go_away goes_away went_away|weg+gehen geht weggegangen|s|intransitive|person animal|
see sees saw|sehen sieht gesehen|h|transitive|person animal|person animal thing food room
hear hears heard|hören hört gehört|h|transitive|person animal|person animal
love loves loved|lieben liebt geliebt|h|transitive|person|person animal room
buy buys bought|kaufen kauft gekauft|h|transitive|person|thing food
sell sells sold|verkaufen verkauft verkauft|h|transitive|person|thing food building
eat eats ate|essen isst gegessen|h|transitive|person|food
find finds found|finden findet gefunden|h|transitive|person animal|person animal thing food
know knows knew|kennen kennt gekannt|h|transitive|person|person room
look_for looks_for looked_for|suchen sucht gesucht|h|transitive|person animal|person animal thing food
take takes took|nehmen nimmt genommen|h|transitive|person|thing food
carry carries carried|tragen trägt getragen|h|transitive|person|thing food pet
wear wears wore|tragen trägt getragen|h|transitive|person|clothing
paint paints painted|malen malt gemalt|h|transitive|person|person animal building
draw draws drew|zeichnen zeichnet gezeichnet|h|transitive|person|person animal thing building
read reads read|lesen liest gelesen|h|transitive|person|text
wash washes washed|waschen wäscht gewaschen|h|transitive|person|clothing fragile pet
repair repairs repaired|reparieren repariert repariert|h|transitive|person|machine
break breaks broke|zerbrechen zerbricht zerbrochen|h|transitive|person animal|fragile
need needs needed|brauchen braucht gebraucht|h|transitive|person|thing person
forget forgets forgot|vergessen vergisst vergessen|h|transitive|person|thing person
lose loses lost|verlieren verliert verloren|h|transitive|person|thing
hide hides hid|verstecken versteckt versteckt|h|transitive|person animal|thing food
steal steals stole|stehlen stiehlt gestohlen|h|transitive|person animal|thing food
bake bakes baked|backen backt gebacken|h|transitive|person|baked
boil boils boiled|kochen kocht gekocht|h|transitive|person|cooked
cut cuts cut|schneiden schneidet geschnitten|h|transitive|person|food
visit visits visited|besuchen besucht besucht|h|transitive|person|person room
greet greets greeted|grüßen grüßt gegrüßt|h|transitive|person|person
understand understands understood|verstehen versteht verstanden|h|transitive|person|person text
catch catches caught|fangen fängt gefangen|h|transitive|person animal|animal
feed feeds fed|füttern füttert gefüttert|h|transitive|person|pet
bite bites bit|beißen beißt gebissen|h|transitive|animal|person animal
open opens opened|auf+machen macht aufgemacht|h|transitive|person|openable
close closes closed|zu+machen macht zugemacht|h|transitive|person|openable
call calls called|an+rufen ruft angerufen|h|transitive|person|person
invite invites invited|ein+laden lädt eingeladen|h|transitive|person|person
tidy tidies tidied|auf+räumen räumt aufgeräumt|h|transitive|person|room
pack packs packed|ein+packen packt eingepackt|h|transitive|person|thing
unpack unpacks unpacked|aus+packen packt ausgepackt|h|transitive|person|thing
borrow borrows borrowed|aus+leihen leiht ausgeliehen|h|transitive|person|thing
help helps helped|helfen hilft geholfen|h|dative|person animal|person animal
thank thanks thanked|danken dankt gedankt|h|dative|person|person
follow follows followed|folgen folgt gefolgt|s|dative|person animal|person animal
answer answers answered|antworten antwortet geantwortet|h|dative|person|person
trust trusts trusted|vertrauen vertraut vertraut|h|dative|person|person
listen_to listens_to listened_to|zu+hören hört zugehört|h|dative|person|person animal
give gives gave|geben gibt gegeben|h|ditransitive|person|thing food
show shows showed|zeigen zeigt gezeigt|h|ditransitive|person|thing animal
bring brings brought|bringen bringt gebracht|h|ditransitive|person|thing food
send sends sent|schicken schickt geschickt|h|ditransitive|person|thing
lend lends lent|leihen leiht geliehen|h|ditransitive|person|thing
offer offers offered|an+bieten bietet angeboten|h|ditransitive|person|thing food
go goes went|gehen geht gegangen|s|motion|person animal|
walk walks walked|laufen läuft gelaufen|s|motion|person animal|
run runs ran|rennen rennt gerannt|s|motion|person animal|
jump jumps jumped|springen springt gesprungen|s|motion|person animal|
climb climbs climbed|klettern klettert geklettert|s|motion|person animal|
put puts put|legen legt gelegt|h|placement|person|thing food
place places placed|stellen stellt gestellt|h|placement|person|fragile openable
""")

# English third person, plural | German infinitive, first and third person singular; followed by an infinitive
MODALS = parse("""
can can|können kann
must must|müssen muss
wants_to want_to|wollen will
should should|sollen soll
may may|dürfen darf
""")

# English base, third person, past | German infinitive, first person, third person, participle; followed by "that"
CLAUSE_VERBS = parse("""
say says said|sagen sage sagt gesagt
think thinks thought|denken denke denkt gedacht
know knows knew|wissen weiß weiß gewusst
hope hopes hoped|hoffen hoffe hofft gehofft
believe believes believed|glauben glaube glaubt geglaubt
dream dreams dreamed|träumen träume träumt geträumt
""")

# English | German, attributive stem if different | classes of nouns
ADJECTIVES = parse("""
old|alt|person animal thing room
young|jung|person animal
big|groß|person animal thing food room surface
small|klein|person animal thing food room surface
new|neu|thing room surface
beautiful|schön|person animal thing room
ugly|hässlich|animal thing room
red|rot|thing food surface
blue|blau|thing surface
green|grün|thing food surface
yellow|gelb|thing food
black|schwarz|animal thing
white|weiß|animal thing
brown|braun|animal thing surface
expensive|teuer teur|thing food surface
cheap|billig|thing food surface
heavy|schwer|thing surface
clean|sauber|thing room surface
dirty|schmutzig|animal thing room surface
tired|müde müd|person animal
happy|glücklich|person animal
sad|traurig|person animal
angry|wütend|person animal
hungry|hungrig|person animal
sick|krank|person animal
healthy|gesund|person animal
strong|stark|person animal
clever|klug|person animal
friendly|freundlich|person
brave|mutig|person animal
lazy|faul|person animal
rich|reich|person
poor|arm|person
famous|berühmt|person room
curious|neugierig|person animal
fat|dick|person animal
wild|wild|animal
fresh|frisch|food
sweet|süß|food
sour|sauer saur|food
tasty|lecker|food
warm|warm|food room
cold|kalt|food room
dark|dunkel dunkl|room
quiet|ruhig|person room
empty|leer|room
long|lang|surface
short|kurz|surface
round|rund|surface
broken|kaputt|machine
""")

# English | German | tenses
TIMES = parse("""
today|heute|present past future
yesterday|gestern|past
tomorrow|morgen|future
now|jetzt|present
every_morning|jeden_Morgen|present
every_day|jeden_Tag|present
in_the_evening|am_Abend|present past future
in_the_afternoon|am_Nachmittag|present past future
at_night|in_der_Nacht|present past future
on_Monday|am_Montag|present past future
on_Tuesday|am_Dienstag|present past future
on_Wednesday|am_Mittwoch|present past future
on_Thursday|am_Donnerstag|present past future
on_Friday|am_Freitag|present past future
on_Saturday|am_Samstag|present past future
on_Sunday|am_Sonntag|present past future
in_summer|im_Sommer|present past future
in_winter|im_Winter|present past future
last_week|letzte_Woche|past
last_year|letztes_Jahr|past
next_week|nächste_Woche|future
next_year|nächstes_Jahr|future
""")

# English | German
MANNERS = parse("""
quickly|schnell
slowly|langsam
quietly|leise
carefully|vorsichtig
happily|fröhlich
patiently|geduldig
secretly|heimlich
alone|allein
""")
PLACES = parse("""
here|hier
there|dort
at_home|zu_Hause
outside|draußen
upstairs|oben
""")

# English | German (with the dative) | classes of nouns
PREPOSITIONS = parse("""
in|in|room
on|auf|surface
under|unter|surface
behind|hinter|building surface
next_to|neben|building surface openable
in_front_of|vor|building openable
""")
