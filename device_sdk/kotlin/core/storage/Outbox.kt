package fleetlearn.storage

import fleetlearn.protocol.Json
import fleetlearn.protocol.Message
import fleetlearn.protocol.ProtocolException
import fleetlearn.protocol.crc32
import fleetlearn.protocol.encode
import fleetlearn.protocol.findEncoding
import fleetlearn.protocol.objects
import fleetlearn.protocol.packChunk
import fleetlearn.protocol.readFromDevice
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.StandardCopyOption.ATOMIC_MOVE
import java.nio.file.StandardCopyOption.REPLACE_EXISTING

/** What a task's training leaves, to be saved together. `kept`: for the device's next task of this bundle; empty where
 * it keeps nothing. */
class FinishedUpdate(val report: Message, val contents: List<ByteArray>, val bundle: String, val kept: FloatArray)

/**
 * The finished update that the coordinator has not acknowledged, and what the device keeps from task to task.
 *
 *     pending/parts        the bytes of the report's parts, one after the other
 *     pending/kept.BUNDLE  the kept state after the task, until it is moved to kept/BUNDLE
 *     pending/report.json  the report: the update, and what is kept with it, exist from the moment this file appears
 *     training.json        the task in training, and how often processes began it
 */
class Outbox(private val root: Path) {
    private val pending = root.resolve("pending")
    private val report = pending.resolve("report.json")
    private val parts = pending.resolve("parts")
    private val starts = root.resolve("training.json")

    init {
        for (folder in listOf("pending", "kept")) Files.createDirectories(root.resolve(folder))
        settle()
    }

    /** Make an update durable, and with it what the device keeps: everything, or nothing. */
    fun save(update: FinishedUpdate) {
        writeDurably(parts, *update.contents.toTypedArray())
        if (update.kept.isNotEmpty()) writeDurably(pending.resolve("kept.${update.bundle}"), bytesOf(update.kept))
        writeDurably(report, encode(update.report).encodeToByteArray())
        settle()
    }

    /** Return the report of the update that an earlier process left. Deletes the update where it is damaged. */
    fun load(): Message? {
        val found = stored() ?: return null
        val content = readIfThere(parts) ?: ByteArray(0)
        var begin = 0
        for (part in found["parts"].objects()) {
            val end = begin + (part["size"] as Long).toInt()
            if (end > content.size || crc32(content.copyOfRange(begin, end)) != part["crc32"]) {
                drop(found.text("task"))
                return null
            }
            begin = end
        }
        return found
    }

    /** Delete the update if it is this task's. */
    fun drop(task: String) {
        if (stored()?.task != task) return
        Files.delete(report)
        settle()
    }

    /** Return the update's frames from `offset` on, each with whole blocks of one part. */
    fun chunks(report: Message, transfer: Long, offset: Long, chunkBytes: Int): Sequence<ByteArray> = sequence {
        val content = Files.readAllBytes(parts)
        var (begin, end) = offset.toInt() to 0
        for (part in report["parts"].objects()) {
            end += (part["size"] as Long).toInt()
            val block = findEncoding(part["encoding"] as String).blockBytes
            val most = maxOf(1, chunkBytes / block) * block
            while (begin < end) {
                val payload = content.copyOfRange(begin, minOf(begin + most, end))
                yield(packChunk(transfer, begin.toLong(), payload))
                begin += payload.size
            }
        }
    }

    /** Return what the last task of a bundle left; null before the first task. */
    fun kept(bundle: String, size: Int): FloatArray? =
        readIfThere(root.resolve("kept").resolve(bundle))?.takeIf { it.size == 4 * size && size > 0 }?.let(::floatsOf)

    /** Return how often the training of this task was begun by processes that died during it. */
    fun starts(task: String): Long {
        val text = readIfThere(starts)?.decodeToString()
        val found = text?.let { runCatching { Json.read(it) }.getOrNull() } as? Map<*, *>
        return if (found?.get("task") == task) found["starts"] as? Long ?: 0 else 0
    }

    /** Count a start of this task's training durably, before it begins. */
    fun begin(task: String) =
        writeDurably(starts, Json.write(mapOf("task" to task, "starts" to starts(task) + 1)).encodeToByteArray())

    /** The training ended, well or not, and the process lives. */
    fun end() {
        Files.deleteIfExists(starts)
    }

    private fun stored(): Message? = readIfThere(report)?.let {
        try {
            readFromDevice(it.decodeToString())
        } catch (_: ProtocolException) {
            null
        }
    }

    /** Move what is kept of the update to its place; delete what belongs to no update. */
    private fun settle() {
        val exists = stored() != null
        for (path in filesIn(pending)) {
            val name = path.fileName.toString()
            val bundle = name.removePrefix("kept.")
            when {
                exists && (path == report || path == parts) -> {}
                exists && bundle.length == 64 ->
                    Files.move(path, root.resolve("kept").resolve(bundle), ATOMIC_MOVE, REPLACE_EXISTING)
                else -> Files.delete(path)
            }
        }
    }
}

fun bytesOf(vector: FloatArray): ByteArray {
    val bytes = ByteBuffer.allocate(4 * vector.size).order(ByteOrder.LITTLE_ENDIAN)
    bytes.asFloatBuffer().put(vector)
    return bytes.array()
}

fun floatsOf(content: ByteArray): FloatArray {
    val vector = FloatArray(content.size / 4)
    ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer().get(vector)
    return vector
}
