package fleetlearn.protocol

/** PROTOCOL.md, section 8. */
val CODES = arrayOf(
    "bad-message", "unknown-type", "too-large", "bad-version", "bad-frame", "out-of-turn", "duplicate", "unknown-task",
    "stale-round", "not-wanted", "unknown-content", "wrong-offset", "wrong-length", "wrong-hash", "wrong-parts",
    "bad-encoding", "not-finite", "out-of-range", "norm-too-large", "busy", "replaced", "round-over",
)

/** Longest text for people in a message, in characters (code points). */
const val MAX_TEXT = 1000

/** Return the text as a message may carry it. */
fun clip(text: String): String {
    val count = text.codePointCount(0, text.length)
    return if (count <= MAX_TEXT) text else text.substring(0, text.offsetByCodePoints(0, MAX_TEXT - 1)) + "…"
}

/** A message, a frame or vector bytes that break the protocol. `code` is for programs, `text` for people. */
open class ProtocolException(val code: String, text: String) : Exception("${clip(text)} [$code]") {
    val text: String = clip(text)
}

/** A training bundle that is damaged, foreign, incomplete or too new. */
class BundleException(code: String, text: String) : ProtocolException(code, text)
