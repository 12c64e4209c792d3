package fleetlearn.session

import fleetlearn.protocol.Message

/** A content that the device lacks. */
data class Wanted(
    val sha256: String,
    /** The name for people, such as `graphs/train.onnx`. */
    val name: String,
    /** The path below the state directory of the complete content. */
    val place: String,
    /** Bytes. null: only the coordinator knows. */
    val size: Long?,
    /** Most bytes that the content may have. */
    val limit: Long,
    /** Bytes that arrived in an earlier attempt. */
    val have: Long = 0,
    /** For a difference: SHA-256 of the vector that it differs from, and the whole vector, which is fetched if the
     * difference cannot be had. */
    val base: String? = null,
    val instead: Wanted? = null,
)

/** What a session tells its owner to do, in order. */
sealed interface Command {
    /** Send the message, if the connection is still open. */
    data class Send(val message: Message) : Command

    /** Look up what the task lacks; answer with `located`. */
    data class Locate(val task: Message) : Command

    /** Append to the partial content. `offset` 0 begins it again. */
    class StoreChunk(val wanted: Wanted, val offset: Long, val payload: ByteArray) : Command

    /** Put the complete content in its place, or delete it where its SHA-256 is wrong; answer with `stored`. */
    data class FinishContent(val wanted: Wanted) : Command

    /** Train, or work out what is asked, within so many seconds; answer with `trained`, `answered` or `ended`. */
    data class StartWork(val task: Message, val seconds: Double) : Command

    /** Stop that before its next batch; answer with `ended`. */
    data object StopWork : Command

    /** Make the update and its report durable, all or nothing; answer with `saved`. */
    data class SaveUpdate(val report: Message) : Command

    /** Delete the saved update of this task; stop uploading it. */
    data class DropUpdate(val task: String) : Command

    /** Send the saved update's chunks from `offset` on, instead of any that are being sent; answer with
     * `updateSent`. */
    data class SendUpdate(val report: Message, val transfer: Long, val offset: Long, val chunkBytes: Int) : Command

    /** Send no more chunks of the saved update. */
    data object StopUpdate : Command

    /** Make these keys durable: from now on the device trusts them, and no others. */
    data class SaveTrusted(val keys: List<String>) : Command

    /** Close the connection (what was sent before goes out first); answer with `disconnected`. `after`: seconds after
     * which to connect again, about; null: after a back-off. `code`: 1002 where the coordinator broke the protocol. */
    data class Close(val reason: String, val after: Double?, val code: Int) : Command

    /** A line for the log. */
    data class Note(val text: String, val warning: Boolean) : Command
}
