package fleetlearn.protocol

/** The newest and the oldest version of the protocol that this SDK speaks (PROTOCOL.md, section 10). */
const val PROTOCOL_VERSION = 3L
const val OLDEST_PROTOCOL_VERSION = 1L

/** The WebSocket subprotocol that both sides name in the handshake. */
const val PROTOCOL_NAME = "fleetlearn.v1"
const val MAX_CONTROL_BYTES = 1 shl 16
const val MAX_VECTORS = 8
private const val MAX_VECTOR_BYTES = 1L shl 33

/** A control message that was read: its fields are as PROTOCOL.md says, defaults filled in. */
data class Message(val type: String, val fields: Map<String, Any?>) {
    operator fun get(name: String): Any? = fields[name]

    fun text(name: String): String = fields[name] as String

    fun long(name: String): Long = fields[name] as Long

    fun number(name: String): Double = fields[name] as Double

    fun list(name: String): List<*> = fields[name] as List<*>

    /** The task that the message is about; a task's, a question's or a result's own name. */
    val task: String? get() = fields["task"] as String?
}

/** A vector that a task sends, or a part of a report, as an object of a message. */
fun Any?.objects(): List<Map<String, Any?>> {
    @Suppress("UNCHECKED_CAST")
    return this as List<Map<String, Any?>>
}

fun message(type: String, vararg fields: Pair<String, Any?>) = Message(type, mapOf(*fields))

val identifier = pattern("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
private val functionName = pattern("[A-Za-z_][A-Za-z0-9_.-]{0,99}(:[A-Za-z_][A-Za-z0-9_]{0,99})?")
val digest = pattern("[0-9a-f]{64}")
private val bytes64 = pattern("[0-9a-f]{128}")
private val bytes80 = pattern("[0-9a-f]{160}")
private val bytes82 = pattern("[0-9a-f]{164}")
val name = pattern("[A-Za-z_][A-Za-z0-9_.-]{0,127}")
private val url = pattern("https?://[!-~]{1,4088}")
private val forPeople = text(MAX_TEXT)
private val label = text(100)
private val numbers = record(name, number(), 64)
private val positive = number(1e-30, 1e30)
private val seconds = number(0.0, 366 * 86400.0)
private val offset = integer(0, MAX_VECTOR_BYTES)
private val vectorSize = integer(1, MAX_VECTOR_BYTES)
private val round = integer(0, 1L shl 31)
private val examples = integer(1, 1L shl 31)
private val transfer = integer(1, (1L shl 32) - 1)
private val identifiers = list(identifier, 16)
private val open = record(name, anything, 64)
private val version = integer(0, 1_000_000)
private val code = oneOf(*CODES)

private val held = fields("task" to identifier, "round" to round)
private val delta = fields("base" to digest, "sha256" to digest, "size" to vectorSize)
private val reference = fields(
    "name" to identifier, "sha256" to digest, "size" to vectorSize, "encoding" to identifier,
    "delta" to optional(nullable(delta), null),
)
private val privacyNote = fields(
    "spent" to number(0.0, 1e30), "delta" to number(0.0, 1.0), "epsilon" to optional(nullable(number(0.0, 1e30)), null),
)
private val secureTask = fields(
    "mode" to oneOf("helper", "pairwise"), "minimum" to integer(2, 65537), "bits" to integer(8, 24),
    "most_weight" to optional(nullable(integer(1)), null),
    "least_factor" to optional(nullable(number(1e-30, 1.0)), null), "helper" to optional(nullable(digest), null),
    "noise" to optional(nullable(positive), null), "session" to optional(nullable(digest), null),
    "shares" to optional(record(identifier, bytes82, 96), emptyMap<String, Any>()),
    "reports" to optional(nullable(integer(2, 65537)), null),
)
private val piece = fields("begin" to offset, "size" to vectorSize, "chosen" to optional(flag, false))
private val selection = fields("pieces" to list(piece, 512, 1), "rows" to list(integer(0, 1L shl 31), 8192))
private val share = number(1e-30, 1.0)
private val stepSchedule = fields(
    "kind" to oneOf("constant", "step", "exponential", "linear", "cosine", "one-cycle"),
    "warm_up" to optional(integer(), 0L), "start" to optional(share, 1.0), "every" to optional(integer(1), 1L),
    "factor" to optional(share, 1.0), "steps" to optional(nullable(integer(1)), null),
    "least" to optional(share, 1e-4), "first" to optional(integer(), 0L),
)
private val ownEncoding =
    fields("function" to functionName, "parameters" to optional(numbers, emptyMap<String, Any>()))
private val part =
    fields("name" to identifier, "encoding" to identifier, "size" to vectorSize, "crc32" to integer(0, (1L shl 32) - 1))
private val evaluation =
    fields("examples" to examples, "loss_sum" to number(), "metric_sums" to optional(numbers, emptyMap<String, Any>()))

private val FROM_DEVICE = mapOf(
    "check-in" to fields(
        "protocol" to version, "device" to identifier, "examples" to examples, "runtime" to optional(label, ""),
        "software" to optional(label, ""), "held" to optional(nullable(held), null),
        "memory" to optional(nullable(integer()), null), "tags" to optional(identifiers, emptyList<Any>()),
        "tier" to optional(nullable(identifier), null), "charging" to optional(nullable(flag), null),
        "network" to optional(nullable(oneOf("metered", "unmetered")), null),
        "exchanges" to optional(identifiers, emptyList<Any>()), "algorithms" to optional(identifiers, emptyList<Any>()),
        "encodings" to optional(identifiers, listOf("float32")),
        "models" to optional(list(digest, MAX_VECTORS), emptyList<Any>()),
        "trusts" to optional(list(digest, 8), emptyList<Any>()), "challenge" to optional(nullable(digest), null),
        "newest_protocol" to optional(nullable(version), null), "error" to optional(forPeople, ""),
        "wants" to optional(oneOf("tasks", "model"), "tasks"),
        "privacy" to optional(identifiers, emptyList<Any>()),
        "functions" to optional(list(functionName, 64), emptyList<Any>()),
    ),
    "heartbeat" to fields(
        "task" to optional(nullable(identifier), null), "steps" to optional(integer(), 0L),
        "fetched" to optional(offset, 0L),
    ),
    "fetch" to fields(
        "sha256" to digest, "offset" to optional(offset, 0L), "end" to optional(nullable(offset), null),
        "http" to optional(flag, false), "selection" to optional(nullable(selection), null),
    ),
    "report" to fields(
        "task" to identifier, "round" to round, "parts" to list(part, MAX_VECTORS, 1), "examples" to examples,
        "steps" to integer(1, 1L shl 31), "epochs" to number(0.0, 1e6), "complete" to flag, "loss" to number(),
        "metrics" to optional(numbers, emptyMap<String, Any>()), "seconds" to optional(seconds, 0.0),
        "evaluation" to optional(nullable(evaluation), null), "personal" to optional(nullable(evaluation), null),
        "lost_tied" to optional(flag, false), "clipped" to optional(nullable(flag), null),
        "sealed" to optional(nullable(bytes80), null), "signature" to optional(nullable(bytes64), null),
    ),
    "finished" to fields("task" to identifier),
    "uploaded" to fields("task" to identifier),
    "reply" to fields(
        "task" to identifier, "kind" to identifier, "content" to optional(open, emptyMap<String, Any>()),
        "seconds" to optional(seconds, 0.0),
    ),
    "failed" to fields(
        "task" to identifier,
        "code" to oneOf(
            "diverged", "out-of-time", "out-of-memory", "killed", "disk-full", "bad-bundle", "bad-data", "unsupported",
            "untrusted", "runtime-error", "paused", "stopping",
        ),
        "text" to optional(forPeople, ""),
    ),
)

private val FROM_COORDINATOR = mapOf(
    "welcome" to fields(
        "coordinator" to label, "heartbeat" to number(0.01, 86400.0),
        "chunk_bytes" to integer(4, CHUNK_BYTES.toLong(), 4), "ineligible" to optional(forPeople, ""),
        "waits" to optional(forPeople, ""), "protocol" to optional(version, 1L),
        "newest" to optional(nullable(fields("bundle" to digest, "model" to reference)), null),
        "warning" to optional(forPeople, ""),
    ),
    "task" to fields(
        "task" to identifier, "round" to round, "bundle" to digest, "vectors" to list(reference, MAX_VECTORS, 1),
        "parts" to record(identifier, identifier, MAX_VECTORS, 1), "hyper" to numbers,
        "epochs" to integer(1, 1_000_000),
        "batch_size" to integer(0, 1L shl 31), "seed" to integer(), "deadline" to seconds,
        "time_budget" to optional(nullable(seconds), null), "evaluate" to optional(flag, false),
        "algorithm" to optional(identifier, "plain"), "kept" to optional(nullable(identifier), null),
        "personal_epochs" to optional(nullable(integer(1, 1_000_000)), null),
        "clip" to optional(nullable(positive), null), "local_noise" to optional(nullable(positive), null),
        "privacy" to optional(nullable(privacyNote), null), "secure" to optional(nullable(secureTask), null),
        "schedule" to optional(nullable(stepSchedule), null),
        "function" to optional(nullable(functionName), null),
        "encoding" to optional(nullable(ownEncoding), null),
    ),
    "question" to fields(
        "task" to identifier, "kind" to identifier, "deadline" to seconds, "phase" to optional(integer(1, 1000), 1L),
        "content" to optional(open, emptyMap<String, Any>()), "bundle" to optional(nullable(digest), null),
        "vectors" to optional(list(reference, MAX_VECTORS), emptyList<Any>()),
    ),
    "trust" to fields("keys" to list(digest, 8, 1)),
    "signed" to fields("message" to text(32 * 1024), "key" to digest, "signature" to bytes64),
    "come-back" to fields("after" to seconds, "reason" to oneOf("no-task", "busy", "stopping", "finished")),
    "content" to fields(
        "transfer" to transfer, "sha256" to digest, "size" to offset, "offset" to offset,
        "end" to optional(nullable(offset), null), "url" to optional(nullable(url), null),
        "selected" to optional(nullable(digest), null),
    ),
    "grant" to fields("task" to identifier, "transfer" to transfer, "offset" to offset),
    "weighing" to fields("task" to identifier, "factor" to number(0.0, 1.0)),
    "waiting" to fields("task" to optional(nullable(identifier), null), "sha256" to optional(nullable(digest), null)),
    "accepted" to fields("task" to identifier),
    "cancel" to fields("task" to identifier, "code" to code, "text" to optional(forPeople, "")),
    "refused" to fields(
        "code" to code, "text" to forPeople, "task" to optional(nullable(identifier), null),
        "sha256" to optional(nullable(digest), null),
    ),
)

/** Kind of exchange -> what the content of a question must be, and of a reply; and whether the question sends the
 * model. */
class ExchangeKind(val question: Check, val reply: Check, val vectors: List<String>)

val EXCHANGE_KINDS = mapOf("evaluation" to ExchangeKind(fields(), evaluation, listOf("model")))

/** Check the content of a question or a reply. Throws ProtocolException (bad-message). */
fun contentOf(message: Message): Any? {
    val kind = EXCHANGE_KINDS[message.text("kind")]
    val check = if (message.type == "question") kind?.question else kind?.reply
    return checked(check ?: fields(), message["content"], "the content of a ${message.type}")
}

/** Read a text frame of the coordinator's. Throws ProtocolException (bad-message, unknown-type, too-large). */
fun readFromCoordinator(frame: String): Message = read(frame, FROM_COORDINATOR)

/** Read a message of a device: one that was saved, or in tests. Throws ProtocolException. */
fun readFromDevice(frame: String): Message = read(frame, FROM_DEVICE)

/** Return the message as the text of one frame. Throws ProtocolException where the coordinator would refuse it. */
fun encode(message: Message): String {
    val frame = try {
        Json.write(mapOf("type" to message.type) + message.fields)
    } catch (error: IllegalArgumentException) {
        throw ProtocolException("bad-message", "${message.type}: ${error.message}")
    }
    readFromDevice(frame)
    return frame
}

private fun read(frame: String, table: Map<String, Check>): Message {
    // A character takes 1 to 3 bytes for each of its UTF-16 units.
    if (frame.length > MAX_CONTROL_BYTES || frame.encodeToByteArray().size > MAX_CONTROL_BYTES) {
        throw ProtocolException("too-large", "a message of over $MAX_CONTROL_BYTES bytes was sent")
    }
    val value = try {
        Json.read(frame)
    } catch (error: JsonException) {
        throw ProtocolException("bad-message", "a message is not JSON: ${error.message}")
    }
    val type = (value as? Map<*, *>)?.get("type") as? String
        ?: throw ProtocolException("bad-message", "a message is no object with a type")
    val check = table[type]
        ?: throw ProtocolException("unknown-type", "a message of the type ${type.take(64)} was sent")
    @Suppress("UNCHECKED_CAST")
    return Message(type, checked(check, value, type) as Map<String, Any?>)
}

/** Return the value if the check takes it. Throws ProtocolException (bad-message). */
fun checked(check: Check, value: Any?, what: String): Any? = try {
    check(value, "")
} catch (error: Mismatch) {
    throw ProtocolException("bad-message", "$what: ${error.message}")
}
