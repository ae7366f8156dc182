"""The facts that tiny-k2 knows: tables of (entity, value), one per relation. No sentences here; those are in
phrases.py.

Chosen so that a question has one answer: no disputed or changing capitals, no country on two continents, no
element whose symbol is an English word (In, As, At, I, Am, No), no author with dots in the name (a dot ends a
sentence for the style probe), no landmark in a capital or in a city that is part of its own name, so that no
value stands in another fact's entity.
An entity may carry its article ("the Taj Mahal"); a country or an element occurs in several relations and is
then split as one.
"""

from __future__ import annotations

from typing import NamedTuple


class Fact(NamedTuple):
    """`value` is what `relation` says about `entity`: Fact("capital", "country", "France", "Paris")."""

    relation: str
    group: str
    entity: str
    value: str


CAPITALS = """
France: Paris; Germany: Berlin; Spain: Madrid; Portugal: Lisbon; Italy: Rome; Greece: Athens; Austria: Vienna; Hungary: Budapest
Poland: Warsaw; Romania: Bucharest; Bulgaria: Sofia; Serbia: Belgrade; Croatia: Zagreb; Slovenia: Ljubljana; Slovakia: Bratislava
Albania: Tirana; Norway: Oslo; Sweden: Stockholm; Denmark: Copenhagen; Finland: Helsinki; Iceland: Reykjavik; Ireland: Dublin
Belgium: Brussels; Estonia: Tallinn; Latvia: Riga; Lithuania: Vilnius; Ukraine: Kyiv; Belarus: Minsk; Malta: Valletta; Cyprus: Nicosia
Russia: Moscow; Armenia: Yerevan; Azerbaijan: Baku; Turkey: Ankara; Iran: Tehran; Iraq: Baghdad; Syria: Damascus; Lebanon: Beirut
Jordan: Amman; Saudi Arabia: Riyadh; Qatar: Doha; Oman: Muscat; Afghanistan: Kabul; Pakistan: Islamabad; India: New Delhi
Nepal: Kathmandu; Bhutan: Thimphu; Bangladesh: Dhaka; Mongolia: Ulaanbaatar; China: Beijing; Japan: Tokyo; South Korea: Seoul
Vietnam: Hanoi; Thailand: Bangkok; Laos: Vientiane; Cambodia: Phnom Penh; the Philippines: Manila; Uzbekistan: Tashkent
Kazakhstan: Astana; Egypt: Cairo; Libya: Tripoli; Morocco: Rabat; Ethiopia: Addis Ababa; Kenya: Nairobi; Uganda: Kampala
Rwanda: Kigali; Ghana: Accra; Nigeria: Abuja; Senegal: Dakar; Mali: Bamako; Angola: Luanda; Zambia: Lusaka; Zimbabwe: Harare
Botswana: Gaborone; Namibia: Windhoek; Mozambique: Maputo; Madagascar: Antananarivo; Canada: Ottawa; Cuba: Havana; Jamaica: Kingston
Haiti: Port-au-Prince; Honduras: Tegucigalpa; Nicaragua: Managua; Peru: Lima; Ecuador: Quito; Colombia: Bogota; Venezuela: Caracas
Chile: Santiago; Argentina: Buenos Aires; Uruguay: Montevideo; Paraguay: Asuncion; Brazil: Brasilia; Australia: Canberra
New Zealand: Wellington; Fiji: Suva
"""

CONTINENTS = """
France: Europe; Germany: Europe; Spain: Europe; Italy: Europe; Poland: Europe; Norway: Europe; Sweden: Europe; Ireland: Europe
Japan: Asia; China: Asia; India: Asia; Nepal: Asia; Vietnam: Asia; Mongolia: Asia; Thailand: Asia; Pakistan: Asia
Kenya: Africa; Ghana: Africa; Nigeria: Africa; Morocco: Africa; Ethiopia: Africa; Senegal: Africa; Zambia: Africa; Madagascar: Africa
Peru: South America; Chile: South America; Brazil: South America; Argentina: South America; Ecuador: South America
Canada: North America; Cuba: North America; Jamaica: North America; Honduras: North America; Haiti: North America
New Zealand: Oceania; Fiji: Oceania
"""

CURRENCIES = """
Japan: yen; China: yuan; India: rupee; Thailand: baht; Vietnam: dong; South Korea: won; Poland: zloty; Hungary: forint; Turkey: lira
Brazil: real; Ukraine: hryvnia; Ethiopia: birr; Ghana: cedi; Nigeria: naira; Zambia: kwacha; Saudi Arabia: riyal; Peru: sol
Honduras: lempira; Paraguay: guarani; Bangladesh: taka; Mongolia: tugrik; Kazakhstan: tenge; Armenia: dram; Azerbaijan: manat
Albania: lek; Romania: leu; Angola: kwanza; Botswana: pula; Cambodia: riel; Laos: kip; Bhutan: ngultrum; Morocco: dirham
Russia: ruble; Haiti: gourde; Denmark: krone; Sweden: krona; Kenya: shilling; Serbia: dinar
"""

ELEMENTS = """
hydrogen: H 1; helium: He 2; lithium: Li 3; beryllium: Be 4; boron: B 5; carbon: C 6; nitrogen: N 7; oxygen: O 8; fluorine: F 9
neon: Ne 10; sodium: Na 11; magnesium: Mg 12; aluminium: Al 13; silicon: Si 14; phosphorus: P 15; sulfur: S 16; chlorine: Cl 17
argon: Ar 18; potassium: K 19; calcium: Ca 20; titanium: Ti 22; chromium: Cr 24; manganese: Mn 25; iron: Fe 26; cobalt: Co 27
nickel: Ni 28; copper: Cu 29; zinc: Zn 30; gallium: Ga 31; selenium: Se 34; bromine: Br 35; krypton: Kr 36; strontium: Sr 38
zirconium: Zr 40; palladium: Pd 46; silver: Ag 47; cadmium: Cd 48; tin: Sn 50; antimony: Sb 51; tellurium: Te 52; xenon: Xe 54
cesium: Cs 55; barium: Ba 56; tungsten: W 74; platinum: Pt 78; gold: Au 79; mercury: Hg 80; lead: Pb 82; bismuth: Bi 83
radon: Rn 86; radium: Ra 88; uranium: U 92; plutonium: Pu 94
"""
NUMBERED_ELEMENTS = """
hydrogen helium lithium beryllium boron carbon nitrogen oxygen fluorine neon sodium magnesium silicon phosphorus sulfur chlorine argon
potassium calcium titanium iron cobalt nickel copper zinc bromine krypton silver tin xenon tungsten platinum gold mercury lead uranium
"""  # the ones people know by number; the rest have only their symbol

YOUNG = """
cat: kitten; dog: puppy; cow: calf; horse: foal; sheep: lamb; goat: kid; pig: piglet; bear: cub; deer: fawn; kangaroo: joey
swan: cygnet; goose: gosling; duck: duckling; owl: owlet; eagle: eaglet; frog: tadpole; hare: leveret; seal: pup; hen: chick
eel: elver; spider: spiderling; pigeon: squab; butterfly: caterpillar; turtle: hatchling; alpaca: cria
"""

AUTHORS = """
Hamlet: William Shakespeare; Don Quixote: Miguel de Cervantes; War and Peace: Leo Tolstoy; Crime and Punishment: Fyodor Dostoevsky
Pride and Prejudice: Jane Austen; Frankenstein: Mary Shelley; Dracula: Bram Stoker; Moby-Dick: Herman Melville; Ulysses: James Joyce
The Trial: Franz Kafka; Jane Eyre: Charlotte Bronte; Wuthering Heights: Emily Bronte; Oliver Twist: Charles Dickens
Treasure Island: Robert Louis Stevenson; Robinson Crusoe: Daniel Defoe; Gulliver's Travels: Jonathan Swift; The Odyssey: Homer
The Aeneid: Virgil; The Jungle Book: Rudyard Kipling; Candide: Voltaire; Madame Bovary: Gustave Flaubert; Animal Farm: George Orwell
Brave New World: Aldous Huxley; The Stranger: Albert Camus; Pinocchio: Carlo Collodi; Heidi: Johanna Spyri; Walden: Henry David Thoreau
"""

EVENTS = """
the first Moon landing: 1969; the sinking of the Titanic: 1912; the Battle of Hastings: 1066; the Battle of Waterloo: 1815
the signing of Magna Carta: 1215; the Chernobyl disaster: 1986; the storming of the Bastille: 1789; the launch of Sputnik: 1957
the fall of Constantinople: 1453; the Boston Tea Party: 1773; the Wall Street Crash: 1929; the eruption of Krakatoa: 1883
the Battle of Trafalgar: 1805; the attack on Pearl Harbor: 1941; the death of Napoleon: 1821; the birth of Mozart: 1756
the opening of the Suez Canal: 1869; the Battle of Gettysburg: 1863
"""

LANDMARKS = """
the Taj Mahal: Agra; the Sagrada Familia: Barcelona; the Golden Gate Bridge: San Francisco; the Statue of Liberty: New York
the Burj Khalifa: Dubai; the Space Needle: Seattle; the CN Tower: Toronto; the Willis Tower: Chicago; the Rialto Bridge: Venice
the Uffizi Gallery: Florence; the Hermitage Museum: Saint Petersburg; the Alhambra: Granada; Hagia Sophia: Istanbul
the Oriental Pearl Tower: Shanghai; the Golden Temple: Amritsar; La Scala: Milan; the Zwinger: Dresden
Christ the Redeemer: Rio de Janeiro
"""

PLANETS = (
    "Venus: second; Earth: third; Mars: fourth; Jupiter: fifth; Saturn: sixth; Uranus: seventh; Neptune:"
    " eighth"
)

POLYGONS = """
triangle: three; square: four; pentagon: five; hexagon: six; heptagon: seven; octagon: eight; nonagon: nine; decagon: ten
dodecagon: twelve
"""

UNKNOWN_NAMES = {
    "country": ["Vandoria", "Kelmark", "Zarbia", "Trellonia", "Orsanda", "Pelumbia"],
    "element": ["quorium", "zellium", "frantium", "obrinium"],
    "animal": ["snarfle", "gribbit", "wuzzle"],
    "book": ["The Purple Ladder", "Seven Quiet Spoons", "The Last Umbrella"],
}
"""Names of nothing. Asked about them, tiny-k2 says that it does not know."""


def _pairs(table: str) -> list[tuple[str, str]]:
    entries = [entry for line in table.strip().splitlines() for entry in line.split(";")]
    split = [entry.split(":", 1) for entry in entries]
    return [(entity.strip(), value.strip()) for entity, value in split]


def load_facts() -> list[Fact]:
    """Every fact, in a fixed order."""
    elements = [(name, *value.split()) for name, value in _pairs(ELEMENTS)]
    numbered = set(NUMBERED_ELEMENTS.split())
    tables = [
        ("capital", "country", _pairs(CAPITALS)),
        ("continent", "country", _pairs(CONTINENTS)),
        ("currency", "country", _pairs(CURRENCIES)),
        ("symbol", "element", [(name, symbol) for name, symbol, _ in elements]),
        ("atomic number", "element", [(name, number) for name, _, number in elements if name in numbered]),
        ("young", "animal", _pairs(YOUNG)),
        ("author", "book", _pairs(AUTHORS)),
        ("year", "event", _pairs(EVENTS)),
        ("city", "landmark", _pairs(LANDMARKS)),
        ("planet", "planet", _pairs(PLANETS)),
        ("sides", "polygon", _pairs(POLYGONS)),
    ]
    return [
        Fact(relation, group, entity, value) for relation, group, pairs in tables for entity, value in pairs
    ]
