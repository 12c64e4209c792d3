package fleetlearn.protocol

/** JSON (RFC 8259), strictly. Values are Map, List, String, Boolean, null, Long where a number is written as an
 * integer that a Long holds, and Double. */
object Json {
    private const val MAX_LEVELS = 100

    /** Throws JsonException. */
    fun read(text: String): Any? = Reader(text).whole()

    fun write(value: Any?): String = StringBuilder().also { append(it, value) }.toString()

    private fun append(to: StringBuilder, value: Any?) {
        when (value) {
            null, is Boolean, is Int, is Long -> to.append(value)
            is Float, is Double -> {
                val number = (value as Number).toDouble()
                require(number.isFinite()) { "JSON has no word for $number" }
                to.append(if (value is Float) value.toString() else number.toString())
            }
            is String -> quote(to, value)
            is Map<*, *> -> join(to, value.entries, '{', '}') { (name, one) ->
                quote(to, name as String)
                to.append(':')
                append(to, one)
            }
            is List<*> -> join(to, value, '[', ']') { append(to, it) }
            else -> throw IllegalArgumentException("${value::class} is no value of JSON")
        }
    }

    private fun <T> join(to: StringBuilder, values: Collection<T>, begin: Char, end: Char, one: (T) -> Unit) {
        to.append(begin)
        values.forEachIndexed { index, value ->
            if (index > 0) to.append(',')
            one(value)
        }
        to.append(end)
    }

    private fun quote(to: StringBuilder, text: String) {
        to.append('"')
        for (char in text) {
            when {
                char == '"' || char == '\\' -> to.append('\\').append(char)
                char < ' ' -> to.append("\\u%04x".format(char.code))
                else -> to.append(char)
            }
        }
        to.append('"')
    }

    private class Reader(private val text: String) {
        private var at = 0

        fun whole(): Any? {
            val value = value(0)
            space()
            if (at < text.length) fail("something follows the value")
            return value
        }

        private fun value(level: Int): Any? {
            if (level > MAX_LEVELS) fail("more than $MAX_LEVELS levels")
            space()
            return when (peek()) {
                '{' -> objectAt(level)
                '[' -> array(level)
                '"' -> string()
                't' -> word("true", true)
                'f' -> word("false", false)
                'n' -> word("null", null)
                else -> number()
            }
        }

        private fun objectAt(level: Int): Map<String, Any?> {
            val found = LinkedHashMap<String, Any?>()
            at++
            space()
            if (taken('}')) return found
            while (true) {
                space()
                if (peek() != '"') fail("a name was expected")
                val name = string()
                space()
                if (!taken(':')) fail("a colon was expected")
                found[name] = value(level + 1)
                space()
                if (taken('}')) return found
                if (!taken(',')) fail("a comma was expected")
            }
        }

        private fun array(level: Int): List<Any?> {
            val found = ArrayList<Any?>()
            at++
            space()
            if (taken(']')) return found
            while (true) {
                found.add(value(level + 1))
                space()
                if (taken(']')) return found
                if (!taken(',')) fail("a comma was expected")
            }
        }

        private fun string(): String {
            val found = StringBuilder()
            at++
            while (true) {
                val char = peek() ?: fail("a string does not end")
                at++
                when {
                    char == '"' -> break
                    char == '\\' -> found.append(escaped())
                    char < ' ' -> fail("a control character in a string")
                    else -> found.append(char)
                }
            }
            return whole(found.toString())
        }

        private fun escaped(): Char {
            val char = peek() ?: fail("a string does not end")
            at++
            return when (char) {
                '"', '\\', '/' -> char
                'b' -> '\b'
                'f' -> '\u000c'
                'n' -> '\n'
                'r' -> '\r'
                't' -> '\t'
                'u' -> {
                    val digits = text.substring(at, minOf(at + 4, text.length))
                    if (!HEX.matches(digits)) fail("\\u$digits is no character")
                    at += 4
                    digits.toInt(16).toChar()
                }
                else -> fail("\\$char is no character")
            }
        }

        /** Halves of a pair must not stand alone. */
        private fun whole(found: String): String {
            var index = 0
            while (index < found.length) {
                val pair = found[index].isHighSurrogate() && found.getOrNull(index + 1)?.isLowSurrogate() == true
                if (found[index].isSurrogate() && !pair) fail("a lone surrogate in a string")
                index += if (pair) 2 else 1
            }
            return found
        }

        private fun number(): Number {
            val match = NUMBER.matchAt(text, at) ?: fail("no value")
            at = match.range.last + 1
            val integer = match.groupValues[1].isEmpty() && match.groupValues[2].isEmpty()
            return (if (integer) match.value.toLongOrNull() else null) ?: match.value.toDouble()
        }

        private fun word(word: String, value: Any?): Any? {
            if (!text.startsWith(word, at)) fail("no value")
            at += word.length
            return value
        }

        private fun peek(): Char? = text.getOrNull(at)

        private fun taken(char: Char): Boolean = (peek() == char).also { if (it) at++ }

        private fun space() {
            while (at < text.length && text[at] in " \t\n\r") at++
        }

        private fun fail(why: String): Nothing = throw JsonException("$why, at character $at")
    }

    private val HEX = Regex("[0-9a-fA-F]{4}")
    private val NUMBER = Regex("-?(?:0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?")
}

class JsonException(text: String) : Exception(text)
