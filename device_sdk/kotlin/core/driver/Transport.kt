package fleetlearn.driver

/** What a WebSocket tells its owner, from another thread. `ended` comes once, after the last message. */
interface Listener {
    fun opened()

    /** A whole message. The next one comes after `request` of its socket was called. */
    fun text(message: String)

    fun binary(message: ByteArray)

    /** The connection is gone, or could not be opened. `retryAfter`: seconds that a refused handshake asked for. */
    fun ended(reason: String, retryAfter: Double)
}

/** One WebSocket. */
interface Socket {
    /** Send a whole message, and wait until the system took it. Returns false where the connection is gone. */
    fun send(message: String): Boolean

    fun send(message: ByteArray): Boolean

    /** Ask for a sign of life; the connection is given up where none comes in time. */
    fun ping()

    /** Let one more message come. */
    fun request()

    /** Close; what was sent before goes out first. */
    fun close(code: Int)

    fun abort()
}

/** Opens WebSockets. `WebSockets` is one; an app may have another (OkHttp). */
fun interface Transport {
    fun connect(url: String, headers: Map<String, String>, listener: Listener): Socket
}
