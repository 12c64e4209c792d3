package fleetlearn.protocol

/** Why a value is not what it must be. */
class Mismatch(text: String) : Exception(text)

/** Takes a value of JSON and where it stands, and returns it; throws Mismatch. */
fun interface Check {
    operator fun invoke(value: Any?, place: String): Any?
}

private fun expected(what: String, place: String): Nothing = throw Mismatch("expected $what at $place")

/** A string of `least` to `most` characters (code points). */
fun text(most: Int, least: Int = 0) = Check { value, place ->
    val length = (value as? String ?: expected("a string", place)).let { it.codePointCount(0, it.length) }
    if (length in least..most) value else expected("$least to $most characters", place)
}

fun pattern(wanted: String): Check {
    val regex = Regex(wanted)
    return Check { value, place ->
        if (value is String && regex.matches(value)) value else expected("a string that matches $wanted", place)
    }
}

fun oneOf(vararg words: String) = Check { value, place ->
    if (value in words) value else expected("one of ${words.joinToString()}", place)
}

val flag = Check { value, place -> value as? Boolean ?: expected("true or false", place) }
val anything = Check { value, _ -> value }

fun number(least: Double = -1e30, most: Double = 1e30) = Check { value, place ->
    val found = (value as? Number)?.toDouble()
    if (found != null && found >= least && found <= most) found else expected("a number from $least to $most", place)
}

const val LARGEST = (1L shl 53) - 1

fun integer(least: Long = 0, most: Long = LARGEST, multiple: Long = 1) = Check { value, place ->
    if (value is Long && value in least..most && value % multiple == 0L) value
    else expected("an integer from $least to $most", place)
}

fun nullable(check: Check) = Check { value, place -> if (value == null) null else check(value, place) }

fun list(check: Check, most: Int, least: Int = 0) = Check { value, place ->
    if (value !is List<*> || value.size !in least..most) expected("an array of $least to $most entries", place)
    value.mapIndexed { index, one -> check(one, "$place[$index]") }
}

/** An object from names to values. */
fun record(key: Check, check: Check, most: Int, least: Int = 0) = Check { value, place ->
    if (value !is Map<*, *> || value.size !in least..most) expected("an object of $least to $most entries", place)
    value.entries.associate { (name, one) -> key(name, place) to check(one, "$place.$name") }
}

/** A field of an object: `fallback` where it is left out; `LEFT_OUT`: not at all then. */
class Field(val check: Check, val required: Boolean = true, val fallback: Any? = null)

val LEFT_OUT = Any()

fun optional(check: Check, fallback: Any?) = Field(check, false, fallback)

/** An object. A field is a Check, which must be there, or a Field. Fields that are not known are left out. */
fun fields(vararg known: Pair<String, Any>): Check {
    val table = known.map { (name, one) -> name to (one as? Field ?: Field(one as Check)) }
    return Check { value, place ->
        if (value !is Map<*, *>) expected("an object", place)
        val found = LinkedHashMap<String, Any?>()
        for ((name, field) in table) {
            when {
                value.containsKey(name) ->
                    found[name] = field.check(value[name], if (place == "") name else "$place.$name")
                field.required -> expected("the field $name", place.ifEmpty { "the message" })
                field.fallback !== LEFT_OUT -> found[name] = field.fallback
            }
        }
        found
    }
}
