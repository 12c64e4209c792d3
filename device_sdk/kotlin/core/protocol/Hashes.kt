package fleetlearn.protocol

import java.security.MessageDigest
import java.util.zip.CRC32

fun sha256(content: ByteArray): String = hex(MessageDigest.getInstance("SHA-256").digest(content))

fun crc32(content: ByteArray): Long = CRC32().apply { update(content) }.value

fun hex(content: ByteArray): String = content.joinToString("") { "%02x".format(it) }

fun fromHex(text: String): ByteArray =
    ByteArray(text.length / 2) { text.substring(2 * it, 2 * it + 2).toInt(16).toByte() }

/** Return the bytes that are signed where a coordinator signs its tasks (PROTOCOL.md, "Signed tasks"). */
fun signedBytes(challenge: String, device: String, message: String): ByteArray =
    listOf("fleetlearn.v1 signed message", challenge, device, message).joinToString("\n").encodeToByteArray()
