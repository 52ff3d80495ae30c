"""What languages are known by: their most frequent words, and letters that their neighbours lack.

Frequent words make up a third of any text, whatever it is about. A word of several languages counts less for each.
"""

from __future__ import annotations

LATIN = {
    "English": "the of and to in is that it was for with as on are be this by not but from have they you his her which she "
    "he at or an had were been their has will would there what so who when if can said them then its all we my",
    "German": "der die das und ist nicht ein eine einen einem einer den dem des zu mit sich auf für im von auch es war sie er "
    "ich wir aber als an aus bei noch nach wie so wenn wird werden hat haben nur oder über zum zur kann sind man mehr durch",
    "French": "à le la les de des du et est une un que qui dans pour pas ce il elle sur au aux par plus avec ne se sont en ou "
    "mais comme nous vous ils cette son sa ses leur être avoir fait était été tout bien je tu mon même si où aussi très avait",
    "Spanish": "a el la los las de del y que en un una es por con para no se su al lo como más pero sus le ya o este sí porque "
    "esta entre cuando muy sin sobre también me hasta hay donde quien desde todo nos durante todos uno ser fue había era "
    "puede está solo así esto eso ese esa otro otra cada tiene",
    "Portuguese": "o a os as de do da dos das e que em um uma é por com para não se na no nas nos ao mais mas como foi ele ela "
    "seu sua ou ser quando muito há já está eu também só pelo pela até isso entre era depois sem mesmo aos ter são você",
    "Italian": "a il lo la i gli le di del della dei delle e che in un una è per con non si da al alla sono come più ma anche "
    "nel nella ha ho questo questa se o su dal suo sua loro era stato essere quando molto tutti perché ci lui lei cosa sia",
    "Dutch": "de het een en van is in dat op te zijn met voor niet aan er om ook als maar bij uit nog naar dan door over ze "
    "hij was werd die had hebben deze wordt kan meer tot geen mijn haar je wij zij omdat worden heeft wat zou moet",
    "Swedish": "och att det som en ett är för på inte av med den till har i om var jag de så men han hon från vi kan när nu "
    "där eller sig ska hade vara efter bara alla mycket blev också då mig över man sin detta något skulle under mer",
    "Danish": "og at det er en et til af på for ikke med den der som har de i jeg han hun men var fra vi kan når nu eller sig "
    "skal havde være efter kun alle meget blev også da mig over man sin dette noget skulle under mere hvad hvor ud op dig "
    "lille hver blive vil gik sagde ville af hende",
    "Norwegian": "og å det er en et til av på for ikke med den som har de i jeg han hun men var fra vi kan når nå eller seg "
    "skal hadde være etter bare alle mye ble også da meg over man sin dette noe skulle under mer hva hvor ut opp deg hvis "
    "liten hver bli vil gikk sa ville av henne at",
    "Finnish": "ja on ei se että oli hän ovat mutta niin kuin kun myös joka minä sinä me he tämä ole vain jos nyt sen hänen "
    "olla mitä siitä tai sitten jo olen sekä voi kanssa ollut mukaan jälkeen vielä eivät kaikki koska ennen nämä jotka",
    "Polish": "i w z na do się nie to jest że o jak po za od przez ale co czy tak już jego jej był była było są być dla oraz "
    "tylko który która które może tego przy ich lub kiedy bardzo jeszcze też gdy mnie ja ty my pod żeby więc można nawet",
    "Czech": "a v je se na že s z do to o i ve k pro ale jako by po od za jsem si tak co byl byla bylo nebo jeho být není ze "
    "aby jsou když už jen také které který která při až než podle může před mezi ještě jak své tím kde její velmi proto",
    "Slovak": "a v je sa na že s z do to o i vo k pre ale ako by po od za som si tak čo bol bola bolo alebo jeho byť nie zo "
    "aby sú keď už len tiež ktoré ktorý ktorá pri až než podľa môže pred medzi ešte svoje tým kde jej veľmi preto",
    "Hungarian": "a az és hogy nem is egy van volt meg ez de csak már el még ha mint vagy azt mert kell lesz ki sem ezt aki "
    "amely be minden így úgy nagyon után ő én mi pedig most lehet olyan vissza között ami fel majd voltak több ezek",
    "Romanian": "și de la în a cu pe nu este o un din care mai că se pentru sunt au fost el ea ce dar sau prin după lui lor "
    "această acest foarte când fi am ai ne îi are era într către doar ca fără până dacă noi poate iar acum",
    "Turkish": "ve bir bu da de için ile o çok ne daha gibi ama var olan olarak kadar sonra en ben her değil mi ki ya veya "
    "olduğu ise yok şey onun diye nasıl biz sen kendi bunu oldu içinde tarafından önce göre iyi zaman hiç bile eğer",
    "Indonesian": "yang dan di ini itu dengan untuk dari tidak pada adalah dalam ke akan juga oleh saya kami mereka dia ada "
    "telah sudah atau bisa karena seperti lebih kita anda tetapi hanya dapat banyak tersebut sebagai secara bahwa satu",
    "Vietnamese": "và của là có không được trong cho một người những với các này khi đã đến ra để về cũng như từ tôi anh nó "
    "lại đó ở trên sẽ phải rất nhiều thì mà vào nhưng hay còn đi bị nên theo sau năm nếu chúng",
    "Catalan": "a el la els les de del dels i que en un una és per amb no es al als ho com més però seu seva ja o aquest "
    "aquesta entre quan molt sense sobre també fins hi ha on des tot ens durant ser va eren era perquè són han",
    "Croatian": "i u je se na da su za od s o kao ne što koji koja koje bi ili ali iz do po nije sam bio bila bilo kako to "
    "samo će te pri biti još kada već prema može nakon između gdje ga mu im sve ako zbog njegov njih smo "
    "jer uvijek treba on ona oni mi vi ste ovo ova ovaj taj ta svi gdje tko jedan jedna prije poslije nego",
}
CYRILLIC = {
    "Russian": "и в не на что он с как это я его но к она по они все мы из у за от так же было бы был о для еще ещё когда "
    "только если или уже до вы есть при чтобы который которые нет ему может быть их этого были между",
    "Ukrainian": "і в не на що він з як це я його але до вона по вони всі ми із у за від так же було б був про для ще коли "
    "тільки якщо або вже ви є при щоб який які немає йому може бути їх цього були та й між дуже",
    "Bulgarian": "и в не на че той с как това аз му но към тя по те всички ние от за да се са така беше бил още когато само "
    "ако или вече до вие има при който които няма може бъде им този бяха между ще си като след много",
    "Serbian": "и у је се на да су за од с о као не што који која које би или али из до по није сам био била било како то "
    "само ће те при бити још када већ према може након између где га му им све ако због његов њих смо",
}

# Letters by which a text is told from its neighbours where its words do not suffice.
LETTERS = {
    "German": "ß",
    "Spanish": "ñ¿¡",
    "Portuguese": "ãõ",
    "Danish": "æø",
    "Norwegian": "æø",
    "Polish": "łążęśźń",
    "Czech": "řěů",
    "Slovak": "ľĺŕ",
    "Hungarian": "őű",
    "Romanian": "țșăţş",
    "Turkish": "ığş",
    "Vietnamese": "ơưđạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ",
    "Catalan": "ŀ",
    "Russian": "ыэё",
    "Ukrainian": "іїєґ",
    "Bulgarian": "ъ",
    "Serbian": "ђјљњћџ",
}

# Scripts that one language is written in, or nearly so.
OF_SCRIPT = {
    "HANGUL": "Korean",
    "ARABIC": "Arabic",
    "HEBREW": "Hebrew",
    "DEVANAGARI": "Hindi",
    "BENGALI": "Bengali",
    "GURMUKHI": "Punjabi",
    "GUJARATI": "Gujarati",
    "TAMIL": "Tamil",
    "TELUGU": "Telugu",
    "KANNADA": "Kannada",
    "MALAYALAM": "Malayalam",
    "SINHALA": "Sinhala",
    "THAI": "Thai",
    "LAO": "Lao",
    "MYANMAR": "Burmese",
    "KHMER": "Khmer",
    "TIBETAN": "Tibetan",
    "ETHIOPIC": "Amharic",
    "GEORGIAN": "Georgian",
    "ARMENIAN": "Armenian",
    "GREEK": "Greek",
}
