package fleetlearn.session

import fleetlearn.protocol.Message

/** The connection. */
sealed interface Link {
    data object Offline : Link

    /** The device is connected and has checked in. The welcome has not come. */
    data object CheckingIn : Link

    /** Welcomed. The interval is in seconds; `nextHeartbeat` by the owner's clock. */
    data class Online(val heartbeatInterval: Double, val nextHeartbeat: Double, val chunkBytes: Int) : Link

    /** Close was commanded; whatever still arrives is ignored. */
    data object Closing : Link
}

/** A task or a question that is not done yet. `deadline`: when the result must have arrived, by the owner's clock.
 * `arrived`: the place of each content that arrived to its last byte; twice where its SHA-256 was wrong the first
 * time. */
data class Assignment(val task: Message, val deadline: Double, val arrived: List<String> = emptyList())

/** The task. */
sealed interface Work {
    val task: String?

    data object Idle : Work {
        override val task: String? get() = null
    }

    sealed interface Unfinished : Work {
        val assignment: Assignment
        override val task: String get() = assignment.task.text("task")
    }

    /** The device waits to know which contents are lacking; or to be online, or for an earlier training to end. */
    data class Locating(override val assignment: Assignment) : Unfinished

    /** The first of the wanted contents was asked for. `content`: the answer. `end`: where the next chunk begins. */
    data class Fetching(
        override val assignment: Assignment,
        val wanted: List<Wanted>,
        val content: Message? = null,
        val end: Long = 0,
    ) : Unfinished

    /** The first of the wanted contents is complete, and its hash is being checked. */
    data class Storing(override val assignment: Assignment, val wanted: List<Wanted>) : Unfinished

    data class Training(override val assignment: Assignment) : Unfinished

    /** The reply is sent on each connection until it is answered. It is not durable. */
    data class Answered(val message: Message) : Work {
        override val task: String get() = message.text("task")
    }

    /** The task is trained; its update is being made durable. */
    data class Saving(val report: Message) : Work {
        override val task: String get() = report.text("task")
    }

    /** The update is durable. `reportedAgain`: a second time, since other bytes arrived the first time. */
    sealed interface Finished : Work {
        val report: Message
        val reportedAgain: Boolean
        override val task: String get() = report.text("task")
    }

    /** It is reported as soon as the device is online. Its upload is not granted. */
    data class Holding(override val report: Message, override val reportedAgain: Boolean) : Finished

    data class Uploading(
        override val report: Message,
        override val reportedAgain: Boolean,
        val transfer: Long,
    ) : Finished

    /** All chunks were sent. The acknowledgement has not come. */
    data class Sent(override val report: Message, override val reportedAgain: Boolean, val transfer: Long) : Finished
}
