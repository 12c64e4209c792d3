package fleetlearn.storage

import fleetlearn.protocol.Json
import fleetlearn.protocol.digest
import fleetlearn.protocol.identifier
import fleetlearn.protocol.list
import java.nio.channels.FileChannel
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.StandardOpenOption.CREATE
import java.nio.file.StandardOpenOption.WRITE
import java.security.SecureRandom
import java.util.Base64

/** The state directory is in use, or cannot be used. */
class StateException(text: String) : Exception(text)

/**
 * What outlives the process, locked against others until `close`. One of this SDK, and not of the Python SDK: the two
 * write other files.
 */
class StateDirectory(private val root: Path, name: String? = null) : AutoCloseable {
    private val lock: FileChannel
    val device: String
    val contents: Contents
    val outbox: Outbox

    init {
        Files.createDirectories(root)
        lock = FileChannel.open(root.resolve("lock"), CREATE, WRITE)
        if (lock.tryLock() == null) {
            lock.close()
            throw StateException("the state directory $root is in use by another process: each device needs its own")
        }
        device = readOrMakeName(name)
        contents = Contents(root)
        outbox = Outbox(root)
    }

    /** The public keys that the device trusts; empty: it does any task. */
    var trusted: List<String>
        get() = read("trusted.json")?.let { list(digest, 8)(it["keys"], "keys") as List<*> }?.map { it as String }
            ?: emptyList()
        set(keys) = write("trusted.json", mapOf("keys" to keys))

    /** Return the headers that show who the device is; it makes itself a credential, durably, where it is given a
     * token. */
    fun headers(token: String?): Map<String, String> {
        var secret = read("credential.json")?.get("secret") as String?
        if (secret == null) {
            if (token == null) return emptyMap()
            secret = randomText(32)
            write("credential.json", mapOf("secret" to secret))
        }
        val known = mapOf("Authorization" to "Bearer $secret", "Fleetlearn-Device" to device)
        return if (token == null) known else known + ("Fleetlearn-Enrolment" to token)
    }

    override fun close() = lock.close()

    private fun readOrMakeName(name: String?): String {
        val stored = read("identity.json")?.let { identifier(it["device"], "the device's name") as String }
        if (stored != null && name != null && stored != name) {
            val text = "the state directory $root is of $stored, not of $name: leave the name out, or take another"
            throw StateException(text)
        }
        if (stored != null) return stored
        val made = identifier(name ?: randomText(16), "the device's name") as String
        write("identity.json", mapOf("device" to made))
        return made
    }

    private fun read(file: String): Map<*, *>? =
        readIfThere(root.resolve(file))?.let { Json.read(it.decodeToString()) as Map<*, *> }

    private fun write(file: String, value: Map<String, Any?>) =
        writeDurably(root.resolve(file), Json.write(value).encodeToByteArray())
}

private val random = SecureRandom()

fun randomBytes(count: Int): ByteArray = ByteArray(count).also(random::nextBytes)

/** Return random bytes in base64url. The first character is a letter or a digit, as a name's must be. */
private fun randomText(count: Int): String {
    val text = Base64.getUrlEncoder().withoutPadding().encodeToString(randomBytes(count))
    return if (text[0].isLetterOrDigit()) text else randomText(count)
}
