package fleetlearn.protocol

import java.nio.ByteBuffer
import java.nio.ByteOrder

/** Bytes of a full chunk's payload. */
const val CHUNK_BYTES = 128 * 1024
private const val HEADER_BYTES = 16

/** Largest binary message, in bytes. */
const val MAX_FRAME_BYTES = HEADER_BYTES + CHUNK_BYTES

/** `offset`: place of the payload's first byte in the content or upload. */
class Chunk(val transfer: Long, val offset: Long, val payload: ByteArray)

/** Return a chunk as one binary message. `payload` is 1 to CHUNK_BYTES bytes. */
fun packChunk(transfer: Long, offset: Long, payload: ByteArray): ByteArray {
    require(payload.size in 1..CHUNK_BYTES) { "a chunk of ${payload.size} bytes was given; it takes 1 to $CHUNK_BYTES" }
    val frame = ByteBuffer.allocate(HEADER_BYTES + payload.size).order(ByteOrder.LITTLE_ENDIAN)
    return frame.putInt(1).putInt(transfer.toInt()).putLong(offset).put(payload).array()
}

/** Read a binary message. Throws ProtocolException (bad-frame, too-large). */
fun unpackChunk(frame: ByteArray): Chunk {
    if (frame.size <= HEADER_BYTES) {
        throw ProtocolException("bad-frame", "a binary frame of ${frame.size} bytes was sent")
    }
    if (frame.size > MAX_FRAME_BYTES) throw ProtocolException("too-large", "a chunk of ${frame.size} bytes was sent")
    val header = ByteBuffer.wrap(frame).order(ByteOrder.LITTLE_ENDIAN)
    if (header.getInt() != 1) throw ProtocolException("bad-frame", "a binary frame does not begin with 1 0 0 0")
    val transfer = header.getInt().toLong() and 0xffffffffL
    return Chunk(transfer, header.getLong(), frame.copyOfRange(HEADER_BYTES, frame.size))
}
