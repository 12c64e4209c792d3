package fleetlearn.protocol

import kotlin.math.floor

const val MAX_MANIFEST_BYTES = 16 shl 20
const val TRAIN = "graphs/train.onnx"
const val EVAL = "graphs/eval.onnx"
const val FROZEN = "graphs/frozen.safetensors"
const val PARAMETERS = "parameters.safetensors"
const val STATE = "state.safetensors"
private const val INFER = "graphs/infer.onnx"
private const val TRAIN_MANY = "graphs/train_many.onnx"
private val OF_FEATURES =
    listOf("graphs/features.onnx", "graphs/train_from_features.onnx", "graphs/eval_from_features.onnx")
private val ORT_TRAINING = listOf("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
private const val MAX_ELEMENTS = 1L shl 31
private val PLAIN_NAME = Regex("[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_-])?")

private val tensorName = text(256, 1)
private val shape = list(integer(1, MAX_ELEMENTS), 32)
private val place = integer(0, MAX_ELEMENTS)
private val bytes = integer(0, 1L shl 43)
private val input = fields(
    "name" to tensorName, "dtype" to oneOf("float32", "float64", "int64", "int32", "uint8", "bool"), "shape" to shape,
    "below" to optional(nullable(integer(1)), null), "ignored" to optional(nullable(integer(-LARGEST)), null),
)
private val MANIFEST = fields(
    "format" to text(100), "version" to integer(), "name" to text(100, 1),
    "parameters" to list(
        fields(
            "name" to tensorName, "shape" to shape, "offset" to place, "buffer" to optional(flag, false),
            "personal" to optional(flag, false), "infer_offset" to optional(nullable(bytes), null),
        ),
        100_000, 1,
    ),
    "batch" to list(input, 64, 1), "outputs" to list(input, 64, 1),
    "hyper" to list(fields("name" to name, "default" to optional(nullable(number()), null)), 64),
    "step" to fields(
        "optimizer" to optional(oneOf("sgd", "momentum", "nesterov", "adam", "adamw", "custom"), "sgd"),
        "proximal" to optional(flag, false), "correction" to optional(flag, false),
        "contrastive" to optional(flag, false), "clip" to optional(flag, false),
        "weight_decay" to optional(flag, false),
    ),
    "metrics" to list(name, 64), "files" to record(text(200), fields("sha256" to digest, "size" to bytes), 64),
    "state" to optional(
        list(
            fields("name" to tensorName, "shape" to shape, "offset" to place, "kept" to optional(flag, false)),
            100_000,
        ),
        emptyList<Any>(),
    ),
    "references" to optional(list(oneOf("anchor", "correction", "previous"), 3), emptyList<Any>()),
    "random" to optional(flag, false),
    "many" to optional(
        nullable(
            fields(
                "devices" to integer(1, 1L shl 20), "steps" to integer(1, 10_000),
                "batch" to optional(nullable(integer(1, 1L shl 20)), null),
            ),
        ),
        null,
    ),
    "features" to optional(list(input, 64, 1), LEFT_OUT), "compute" to optional(oneOf("float16"), LEFT_OUT),
    "normalisation" to optional(list(tensorName, 100_000, 1), LEFT_OUT),
    "opset" to optional(integer(0, 1000), 0L), "ir_version" to optional(integer(0, 1000), 0L),
    "made_by" to optional(text(200), ""),
)

/** A row of the parameter table, of the state table, or of the batch. */
class Row(fields: Map<String, Any?>) {
    val name = fields["name"] as String
    val shape = (fields["shape"] as List<*>).map { it as Long }.toLongArray()
    val elements = shape.fold(1L, Long::times)
    val offset = fields["offset"] as Long? ?: 0L
    val buffer = fields["buffer"] == true
    val personal = fields["personal"] == true
    val kept = fields["kept"] == true
    val dtype = fields["dtype"] as String? ?: "float32"
    val below = fields["below"] as Long?
    val ignored = fields["ignored"] as Long?
}

class File(val sha256: String, val size: Long)

/** manifest.json: what a training bundle is (PROTOCOL.md, section 15). */
class Manifest(fields: Map<String, Any?>) {
    val name = fields["name"] as String
    val parameters = fields["parameters"].objects().map(::Row)
    val state = fields["state"].objects().map(::Row)
    val batch = fields["batch"].objects().map(::Row)
    val travelling = parameters.filterNot { it.personal }
    val buffers = travelling.filter { it.buffer }

    /** P, the elements of the flat vector that travels; on the device, the personal ones included; of the state
     * vector. */
    val size = travelling.sumOf { it.elements }.toInt()
    val localSize = parameters.sumOf { it.elements }
    val stateSize = state.sumOf { it.elements }

    /** Hyper-parameter -> its default. */
    val hyper = fields["hyper"].objects().associate { it["name"] as String to it["default"] as Double? }
    val metrics = (fields["metrics"] as List<*>).map { it as String }
    val references = (fields["references"] as List<*>).map { it as String }
    val random = fields["random"] == true
    val files = (fields["files"] as Map<*, *>).entries.associate { (path, file) ->
        path as String to (file as Map<*, *>).let { File(it["sha256"] as String, it["size"] as Long) }
    }

    /** The files that a device reads in a round. */
    val needed: List<String>
        get() = listOf(TRAIN, EVAL) + listOf(FROZEN, STATE).filter { it in files } +
            if (localSize > size) listOf(PARAMETERS) else emptyList()
}

/** Read and check manifest.json. Throws BundleException. */
fun readManifest(content: ByteArray): Manifest {
    if (content.size > MAX_MANIFEST_BYTES) throw BundleException("too-large", "a manifest of ${content.size} bytes")
    val parsed = try {
        Json.read(content.decodeToString(throwOnInvalidSequence = true))
    } catch (error: Exception) {
        throw BundleException("bad-message", "manifest.json is not a bundle's manifest: ${error.message}")
    }
    val (format, version) = (parsed as? Map<*, *>).let { it?.get("format") to it?.get("version") }
    if (format != "fleetlearn.bundle") throw BundleException("bad-message", "manifest.json is of format $format")
    val enormous = version is Double && version > LARGEST && version == floor(version)
    if (enormous || (version is Long && version !in 1..2)) {
        throw BundleException("bad-version", "the bundle is of version $version; this SDK reads 1 and 2")
    }
    @Suppress("UNCHECKED_CAST")
    val fields = try {
        checked(MANIFEST, parsed, "manifest.json") as Map<String, Any?>
    } catch (error: ProtocolException) {
        throw BundleException(error.code, error.text)
    }
    contradiction(fields)?.let { throw BundleException("bad-message", "manifest.json contradicts itself: $it") }
    return Manifest(fields)
}

/** Check what the types alone cannot say. Returns the first thing that is wrong. */
private fun contradiction(fields: Map<String, Any?>): String? {
    val paths = (fields["files"] as Map<*, *>).keys.map { it as String }
    paths.firstOrNull { path -> path.split("/").any { !PLAIN_NAME.matches(it) } }?.let { return "$it is no plain path" }
    fun named(table: String) =
        (fields[table] as List<*>? ?: emptyList<Any>()).map { if (it is Map<*, *>) it["name"] else it }
    val tables = listOf("parameters", "batch", "features", "outputs", "hyper", "metrics", "state")
    for (table in tables + listOf("references", "normalisation")) {
        val names = named(table)
        if (names.toSet().size < names.size) return "a name stands twice in $table"
    }
    // Some file systems do not tell upper case from lower.
    val lower = (paths + "manifest.json").map { it.lowercase() }
    if (lower.toSet().size < lower.size) return "a file is there twice"
    for (row in fields["batch"].objects()) {
        if (row["below"] != null && row["dtype"] !in listOf("int64", "int32", "uint8")) {
            return "batch array ${row["name"]} is ${row["dtype"]} and has a range; integers alone have one"
        }
    }
    if ("seed" in named("hyper")) return "a hyper-parameter is named seed, which is the random steps' own input"
    return contradictionOfFiles(fields, paths) ?: contradictionOfStep(fields) ?: contradictionOfTables(fields)
}

private fun contradictionOfFiles(fields: Map<String, Any?>, paths: List<String>): String? {
    val wanted = mutableListOf(TRAIN, EVAL, INFER, PARAMETERS)
    for (path in paths) {
        if (paths.any { it.lowercase().startsWith("${path.lowercase()}/") }) return "$path is a file and a folder"
        if (path.startsWith("ort_training/")) wanted += ORT_TRAINING.map { "ort_training/$it" }
    }
    if (FROZEN in paths && (fields["version"] as Long) < 2) return "$FROZEN needs version 2"
    if ((fields["many"] != null) != (TRAIN_MANY in paths)) return "$TRAIN_MANY and the entry many belong together"
    if ("features" in fields) {
        wanted += OF_FEATURES
        val ofBatch = fields["batch"].objects().associateBy { it["name"] }
        val features = fields["features"].objects()
        features.firstOrNull { row -> ofBatch[row["name"]].let { it != null && it != row } }
            ?.let { return "feature ${it["name"]} is an array of the batch, and not the same there" }
        if (features.all { it["name"] in ofBatch }) return "all features are arrays of the batch: none is computed"
    } else if (OF_FEATURES.any { it in paths }) {
        return "the graphs of features and the entry features belong together; the entry is missing"
    }
    return wanted.firstOrNull { it !in paths }?.let { "$it is missing" }
}

private fun contradictionOfStep(fields: Map<String, Any?>): String? {
    val read = mapOf(
        "proximal" to listOf("anchor"), "correction" to listOf("correction"),
        "contrastive" to listOf("anchor", "previous"),
    )
    val (step, references) = fields["step"] as Map<*, *> to fields["references"] as List<*>
    for ((kind, needed) in read) {
        if (step[kind] == true) {
            needed.firstOrNull { it !in references }?.let { return "a $kind step reads the reference $it" }
        }
    }
    return null
}

private fun contradictionOfTables(fields: Map<String, Any?>): String? {
    for (table in listOf("parameters", "state")) {
        var end = 0L
        for (row in fields[table].objects().map(::Row)) {
            if (row.offset != end) return "${row.name} begins at ${row.offset}; the ones before it end at $end"
            end += row.shape.fold(1L) { product, axis -> if (product > MAX_ELEMENTS) product else product * axis }
            if (end > MAX_ELEMENTS) return "up to ${row.name} there are $end elements"
        }
    }
    val parameters = fields["parameters"].objects()
    val names = parameters.map { it["name"] }.toSet()
    (fields["normalisation"] as List<*>?)?.firstOrNull { it !in names }?.let { return "no parameter is named $it" }
    val personal = parameters.map { it["personal"] == true }
    if (personal.first()) return "every parameter is personal: nothing travels"
    if (personal.zipWithNext().any { (one, next) -> one && !next }) return "personal parameters are not the last"
    var free = 0L
    for (row in parameters.filter { it["infer_offset"] != null }.sortedBy { it["infer_offset"] as Long }) {
        val begin = row["infer_offset"] as Long
        if (begin < free) return "the bytes of parameter ${row["name"]} in $INFER overlap another's"
        free = begin + 4 * Row(row).elements
    }
    val size = ((fields["files"] as Map<*, *>)[INFER] as Map<*, *>)["size"] as Long
    return if (free > size) "the parameters' bytes end at $free in $INFER, behind its end" else null
}
