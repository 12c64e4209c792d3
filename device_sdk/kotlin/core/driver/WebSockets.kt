package fleetlearn.driver

import fleetlearn.protocol.MAX_CONTROL_BYTES
import fleetlearn.protocol.MAX_FRAME_BYTES
import fleetlearn.protocol.PROTOCOL_NAME
import fleetlearn.storage.randomBytes
import java.io.ByteArrayOutputStream
import java.io.DataInputStream
import java.io.IOException
import java.net.InetSocketAddress
import java.net.URI
import java.nio.ByteBuffer
import java.security.MessageDigest
import java.util.Base64
import java.util.concurrent.ScheduledThreadPoolExecutor
import java.util.concurrent.Semaphore
import java.util.concurrent.TimeUnit.SECONDS
import javax.net.ssl.SSLSocket
import javax.net.ssl.SSLSocketFactory

/** Seconds for connecting and the handshake; in which the coordinator may take nothing; for the closing handshake; and
 * in which a ping must be answered. */
private const val OPEN = 10
private const val SEND = 30L
private const val CLOSE = 5L
private const val LIFE = 20L

private const val TEXT = 1
private const val BINARY = 2
private const val CLOSING = 8
private const val PING = 9
private const val PONG = 10
private const val GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

private val timers = ScheduledThreadPoolExecutor(1) { Thread(it).apply { isDaemon = true } }
    .apply { removeOnCancelPolicy = true }

/**
 * WebSockets (RFC 6455) over the platform's own sockets: no compression, no redirects. The JDK's own client
 * (java.net.http, 17) is not told of a connection that ends without a closing handshake, and Android has none.
 */
class WebSockets(private val tls: SSLSocketFactory = SSLSocketFactory.getDefault() as SSLSocketFactory) : Transport {
    override fun connect(url: String, headers: Map<String, String>, listener: Listener): Socket {
        val socket = WebSocket(URI(url), headers, tls, listener)
        Thread(socket, "fleetlearn-websocket").apply { isDaemon = true }.start()
        return socket
    }
}

private class Refused(text: String, val retryAfter: Double) : IOException(text)

private class WebSocket(
    private val uri: URI,
    private val headers: Map<String, String>,
    private val tls: SSLSocketFactory,
    private val listener: Listener,
) : Socket, Runnable {
    private val plain = java.net.Socket()

    /** Through which bytes go: TLS, or `plain` itself. */
    private lateinit var socket: java.net.Socket
    private val permits = Semaphore(0)

    @Volatile
    private var open = false

    @Volatile
    private var frames = 0L
    private var closeSent = false

    override fun run() {
        var (reason, retryAfter) = "it was given up" to 0.0
        try {
            val input = handshake()
            open = true
            listener.opened()
            reason = read(input)
        } catch (error: Refused) {
            reason = error.message!!
            retryAfter = error.retryAfter
        } catch (error: IOException) {
            reason = "$error"
        } finally {
            open = false
            plain.close()
            listener.ended(reason, retryAfter)
        }
    }

    private fun handshake(): DataInputStream {
        val secure = uri.scheme == "wss"
        val port = if (uri.port > 0) uri.port else if (secure) 443 else 80
        plain.connect(InetSocketAddress(uri.host, port), 1000 * OPEN)
        plain.tcpNoDelay = true
        plain.soTimeout = 1000 * OPEN
        socket = if (!secure) plain else (tls.createSocket(plain, uri.host, port, true) as SSLSocket).apply {
            sslParameters = sslParameters.apply { endpointIdentificationAlgorithm = "HTTPS" } // the name is checked
            startHandshake()
        }
        val key = Base64.getEncoder().encodeToString(randomBytes(16))
        val path = (uri.rawPath.ifEmpty { "/" }) + (uri.rawQuery?.let { "?$it" } ?: "")
        val known = mapOf(
            "Host" to if (uri.port > 0) "${uri.host}:$port" else uri.host, "Upgrade" to "websocket",
            "Connection" to "Upgrade", "Sec-WebSocket-Key" to key, "Sec-WebSocket-Version" to "13",
            "Sec-WebSocket-Protocol" to PROTOCOL_NAME,
        )
        val lines = listOf("GET $path HTTP/1.1") + (known + headers).map { "${it.key}: ${it.value}" }
        socket.getOutputStream().write((lines.joinToString("\r\n") + "\r\n\r\n").encodeToByteArray())
        val input = DataInputStream(socket.getInputStream().buffered())
        val status = line(input)
        val answered = generateSequence { line(input).ifEmpty { null } }.take(100)
            .associate { it.substringBefore(":").lowercase() to it.substringAfter(":").trim() }
        if (!status.startsWith("HTTP/1.1 101")) {
            val after = answered["retry-after"]?.toDoubleOrNull() ?: 0.0
            throw Refused("$uri refuses the connection: $status", after.coerceIn(0.0, 3600.0))
        }
        val digest = MessageDigest.getInstance("SHA-1").digest((key + GUID).encodeToByteArray())
        val accept = Base64.getEncoder().encodeToString(digest)
        if (answered["sec-websocket-accept"] != accept || answered["sec-websocket-protocol"] != PROTOCOL_NAME) {
            throw IOException("$uri is no coordinator: it does not speak $PROTOCOL_NAME")
        }
        plain.soTimeout = 0
        return input
    }

    private fun line(input: DataInputStream): String {
        val line = ByteArrayOutputStream()
        while (line.size() < 8192) {
            val byte = input.readUnsignedByte()
            if (byte == '\n'.code) return line.toString("ISO-8859-1").trimEnd()
            line.write(byte)
        }
        throw IOException("$uri answers with a line that does not end")
    }

    /** Read frames until the connection ends. Returns why it did. */
    private fun read(input: DataInputStream): String {
        val message = ByteArrayOutputStream()
        var kind = 0
        while (true) {
            val first = input.readUnsignedByte()
            val size = when (val short = input.readUnsignedByte()) {
                126 -> input.readUnsignedShort().toLong()
                127 -> input.readLong()
                else -> short.toLong() // a server does not mask, so the highest bit is 0
            }
            frames++
            val opcode = first and 15
            val limit = if (opcode == TEXT) MAX_CONTROL_BYTES else MAX_FRAME_BYTES
            val most = if (opcode >= CLOSING) 125 else limit - message.size()
            if (first and 0x70 != 0 || size !in 0..most.toLong()) {
                return fail(1009, "a frame of $size bytes came; the limit is $most")
            }
            val payload = ByteArray(size.toInt()).also(input::readFully)
            when (opcode) {
                PING -> write(PONG, payload)
                PONG -> {}
                CLOSING -> return closed(payload)
                0, TEXT, BINARY -> {
                    if ((opcode == 0) != (kind != 0)) return fail(1002, "a fragment came out of order")
                    if (opcode != 0) kind = opcode
                    message.write(payload)
                    if (first and 0x80 != 0) {
                        permits.acquire()
                        val whole = message.toByteArray()
                        if (kind == TEXT) listener.text(whole.decodeToString(throwOnInvalidSequence = true))
                        else listener.binary(whole)
                        message.reset()
                        kind = 0
                    }
                }
                else -> return fail(1002, "a frame of the unknown kind $opcode came")
            }
        }
    }

    private fun closed(payload: ByteArray): String {
        val code = if (payload.size < 2) 1005 else ByteBuffer.wrap(payload).short.toInt() and 0xffff
        close(if (code == 1005) 1000 else code)
        val reason = if (payload.size < 2) "" else payload.decodeToString(2, payload.size)
        return "closed with $code $reason".trim()
    }

    private fun fail(code: Int, why: String): String {
        close(code)
        return why
    }

    override fun send(message: String): Boolean = write(TEXT, message.encodeToByteArray())

    override fun send(message: ByteArray): Boolean = write(BINARY, message)

    override fun ping() {
        val seen = frames
        if (write(PING, ByteArray(0))) timers.schedule({ if (frames == seen) abort() }, LIFE, SECONDS)
    }

    override fun request() = permits.release()

    override fun close(code: Int) {
        synchronized(this) {
            if (closeSent) return
            write(CLOSING, ByteBuffer.allocate(2).putShort(code.toShort()).array())
            closeSent = true
        }
        permits.release(1 shl 20) // what still comes is of no use, and the answer is behind it
        timers.schedule(::abort, CLOSE, SECONDS)
    }

    override fun abort() = plain.close()

    /** Write one frame, masked as a client's must be. A coordinator that takes nothing for some time is left. */
    @Synchronized
    private fun write(opcode: Int, payload: ByteArray): Boolean {
        if (!open || closeSent) return false
        val size = payload.size
        val frame = ByteBuffer.allocate(14 + size).put((0x80 or opcode).toByte())
        when {
            size < 126 -> frame.put((0x80 or size).toByte())
            size < 65536 -> frame.put((0x80 or 126).toByte()).putShort(size.toShort())
            else -> frame.put((0x80 or 127).toByte()).putLong(size.toLong())
        }
        val mask = randomBytes(4)
        frame.put(mask)
        for (index in payload.indices) frame.put((payload[index].toInt() xor mask[index and 3].toInt()).toByte())
        val timer = timers.schedule(::abort, SEND, SECONDS)
        return try {
            socket.getOutputStream().write(frame.array(), 0, frame.position())
            true
        } catch (_: IOException) {
            abort()
            false
        } finally {
            timer.cancel(false)
        }
    }
}
