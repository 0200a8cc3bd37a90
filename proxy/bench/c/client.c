/*
 * The client of the benchmark: stateless agents that replay a growing history, from one thread.
 *
 *   usage: client PORT STREAMS STREAMS_PER_KEY FOLDER [chat]
 *
 * Every stream is one keep-alive connection with a conversation of its own. FOLDER has the parts
 * of which bodies are made: `prefix` (up to and including the last item of the history, with a
 * nonce to make conversations differ), `suffix` (from the end of the input on), `echo` (the
 * model's item as the client echoes it) and `item` (the new item of each turn). The body of the
 * n-th follow-up is the prefix, n times "," echo "," item, and the suffix.
 *
 * With `chat` bodies go to /v1/chat/completions, and what comes back are chunks. Those bear no
 * stamps and no numbers: the latency of an event is then the time since its turn began.
 *
 * It does what standard input says, a command a line, and answers each with a line of JSON:
 *
 *   new              every stream begins a new conversation, with a new key: one turn each
 *   turns N [SKIP]   N follow-up turns of every stream; the latencies of the first SKIP events
 *                    of each turn are left out
 *
 * All streams run at once. At the end of input it closes its connections and ends. A reply that is
 * not what the upstream sends (another status, an event lost, doubled or out of order) ends it at
 * once with status 1: a measurement of wrong answers is none.
 */
#define _GNU_SOURCE
#include "common.h"

enum { HEAD_LIMIT = 16384, READ_SIZE = 1 << 18 };
enum Reading { HEAD, SIZE_LINE, CHUNK, CHUNK_END, TRAILER };

typedef struct {
    float *values;
    size_t count, space;
} Samples;

typedef struct {
    int fd, number;
    Buffer body;              /* the request's body as it stands */
    char head[512];
    size_t head_size, sent;
    bool wants_out;
    long turns_left;
    uint64_t began_ns;
    enum Reading reading;
    Buffer reply_head, rest;  /* rest: the beginning of an event that is not complete */
    uint64_t chunk_left;
    bool has_size;
    uint64_t next_number;     /* of the event that must come next */
    bool has_ended;           /* the completed event was seen */
    long events;
    char item_id[ID_DIGITS + 1];
} Stream;

static int poller, port, stream_count, per_key;
static bool is_chat;
static long generation, running;
static Stream *streams;
static Buffer prefix, suffix, echo, item;
static Samples event_us, first_us, turn_us;
static long deltas, skipped;


static void fail_reply(const char *what, const char *bytes, size_t size)
{
    fprintf(stderr, "%s: %.*s\n", what, (int)(size < 300 ? size : 300), bytes);
    exit(1);
}

static void add(Samples *s, uint64_t ns)
{
    if (s->count == s->space)
        s->values = room(s->values, (s->space = s->space * 2 + 4096) * sizeof *s->values);
    s->values[s->count++] = (float)ns / 1e3f;
}

/* --- Requests ---------------------------------------------------------------------------------- */

static void begin_conversation(Stream *s)
{
    s->body.size = 0;
    append(&s->body, prefix.bytes, prefix.size);
    char *nonce = memmem(s->body.bytes, s->body.size, NONCE_MARK, strlen(NONCE_MARK));
    if (!nonce)
        fail("the prefix has no nonce");
    uint64_t value = (uint64_t)getpid() << 44 ^ (uint64_t)generation << 24 ^ (uint64_t)s->number;
    put_digits(nonce + strlen("nonce_"), value, ID_DIGITS, 16);
    append(&s->body, suffix.bytes, suffix.size);
}

static void grow_conversation(Stream *s)
{
    s->body.size -= suffix.size;
    append(&s->body, ",", 1);
    size_t at = s->body.size;
    append(&s->body, echo.bytes, echo.size);
    char *id = memmem(s->body.bytes + at, echo.size, ITEM_MARK, strlen(ITEM_MARK));
    if (!id && !is_chat)
        fail("the echo has no id");
    if (id)
        memcpy(id + strlen("msg_"), s->item_id, ID_DIGITS);
    append(&s->body, ",", 1);
    append(&s->body, item.bytes, item.size);
    append(&s->body, suffix.bytes, suffix.size);
}

static void want_out(Stream *s, bool wanted)
{
    if (s->wants_out == wanted)
        return;
    s->wants_out = wanted;
    struct epoll_event e = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0u), .data.ptr = s};
    epoll_ctl(poller, EPOLL_CTL_MOD, s->fd, &e);
}

static void send_more(Stream *s)
{
    size_t total = s->head_size + s->body.size;
    while (s->sent < total) {
        bool in_head = s->sent < s->head_size;
        size_t body_at = in_head ? 0 : s->sent - s->head_size;
        struct iovec parts[2] = {
            {s->head + (in_head ? s->sent : s->head_size), in_head ? s->head_size - s->sent : 0},
            {s->body.bytes + body_at, s->body.size - body_at},
        };
        ssize_t n = writev(s->fd, parts, 2);
        if (n < 0 && errno == EAGAIN) {
            want_out(s, true);
            return;
        }
        if (n < 0)
            fail("can't send");
        s->sent += (size_t)n;
    }
    want_out(s, false);
}

static void begin_turn(Stream *s)
{
    s->head_size = (size_t)sprintf(
        s->head,
        "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
        "Authorization: Bearer sk-bench-%d-%ld-%d\r\nAccept: text/event-stream\r\n"
        "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
        is_chat ? "/v1/chat/completions" : "/v1/responses", port, (int)getpid(), generation, s->number / per_key, s->body.size);
    s->sent = 0;
    s->next_number = 0;
    s->has_ended = false;
    s->reading = HEAD;
    s->reply_head.size = s->rest.size = 0;
    s->began_ns = now_ns();
    send_more(s);
}

/* --- Replies ----------------------------------------------------------------------------------- */

static const char *value_after(const char *event, size_t size, const char *key)
{
    size_t length = strlen(key);
    const char *at = memmem(event, size, key, length);
    if (!at)
        fail_reply("an event lacks a field", event, size);
    at += length;
    while (*at == ' ')
        at++;
    return at;
}

static uint64_t number_at(const char *at)
{
    uint64_t value = 0;
    while (*at >= '0' && *at <= '9')
        value = value * 10 + (uint64_t)(*at++ - '0');
    return value;
}

static void take_chunk(Stream *s, const char *chunk, size_t size, uint64_t now)
{
    static const char name[] = "data: ", end[] = "data: [DONE]";
    if (s->has_ended || size < sizeof name || memcmp(chunk, name, sizeof name - 1))
        fail_reply("not a chunk", chunk, size);
    if (s->next_number >= (uint64_t)skipped)
        add(&event_us, now - s->began_ns);
    if (!s->next_number++)
        add(&first_us, now - s->began_ns);
    s->events++;
    s->has_ended = size == sizeof end - 1 && !memcmp(chunk, end, size);
}

static void take_event(Stream *s, const char *event, size_t size, uint64_t now)
{
    static const char name[] = "event: response.";
    if (size < sizeof name || memcmp(event, name, sizeof name - 1))
        fail_reply("not an event", event, size);
    uint64_t number = number_at(value_after(event, size, "\"sequence_number\":"));
    if (number != NUMBER_BASE + s->next_number)
        fail_reply("an event out of order", event, size);
    if (s->next_number >= (uint64_t)skipped)
        add(&event_us, now - (number_at(value_after(event, size, "\"ts\":")) - STAMP_BASE));
    if (!s->next_number++)
        add(&first_us, now - s->began_ns);
    s->events++;
    const char *type = event + sizeof name - 1;
    if (!memcmp(type, "output_item", 11)) {
        const char *id = memmem(event, size, "\"msg_", 5);
        if (!id)
            fail_reply("an item without an id", event, size);
        memcpy(s->item_id, id + 5, ID_DIGITS);
    } else if (!memcmp(type, "completed", 9)) {
        s->has_ended = true;
    }
}

/* Take the events that `bytes` complete; return how many bytes they had. */
static size_t take_events(Stream *s, const char *bytes, size_t size, uint64_t now)
{
    size_t used = 0;
    const char *end;
    while ((end = memmem(bytes + used, size - used, "\n\n", 2))) {
        (is_chat ? take_chunk : take_event)(s, bytes + used, (size_t)(end - bytes) - used, now);
        used = (size_t)(end - bytes) + 2;
    }
    return used;
}

static void take_stream(Stream *s, const char *bytes, size_t size, uint64_t now)
{
    if (!s->rest.size) {
        size_t used = take_events(s, bytes, size, now);
        append(&s->rest, bytes + used, size - used);
        return;
    }
    append(&s->rest, bytes, size);
    size_t used = take_events(s, s->rest.bytes, s->rest.size, now);
    memmove(s->rest.bytes, s->rest.bytes + used, s->rest.size - used);
    s->rest.size -= used;
}

static void end_turn(Stream *s, uint64_t now)
{
    if (!s->has_ended || s->rest.size)
        fail_reply("a reply ended early", s->rest.bytes, s->rest.size);
    add(&turn_us, now - s->began_ns);
    if (--s->turns_left) {
        grow_conversation(s);
        begin_turn(s);
    } else {
        running--;
    }
}

static size_t read_head(Stream *s, const char *bytes, size_t size)
{
    size_t old = s->reply_head.size, from = old > 3 ? old - 3 : 0;
    append(&s->reply_head, bytes, size);
    char *head = s->reply_head.bytes;
    char *end = memmem(head + from, s->reply_head.size - from, "\r\n\r\n", 4);
    if (!end) {
        if (s->reply_head.size > HEAD_LIMIT)
            fail_reply("a reply without an end of its head", head, s->reply_head.size);
        return size;
    }
    size_t used = (size_t)(end - head) + 4 - old;
    if (strncmp(head, "HTTP/1.1 200", 12))
        fail_reply("refused", head, s->reply_head.size);
    end[2] = 0;
    const char *coding = header(head, "\ntransfer-encoding:"), *mode = header(head, "\nturnwire-mode:");
    if (!coding || strncasecmp(coding, "chunked", 7))
        fail_reply("a reply that is not chunked", head, s->reply_head.size);
    deltas += mode && !strncmp(mode, "delta", 5);
    s->reading = SIZE_LINE;
    s->chunk_left = 0;
    s->has_size = false;
    return used;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

static size_t read_size_line(Stream *s, const char *bytes, size_t size)
{
    size_t used = 0;
    while (used < size) {
        char c = bytes[used++];
        if (c == '\n') {
            s->reading = s->chunk_left ? CHUNK : TRAILER;
            break;
        }
        int digit = s->has_size ? -1 : hex_digit(c);
        if (digit < 0)
            s->has_size = true; /* an extension, or the end of the line */
        else
            s->chunk_left = s->chunk_left * 16 + (uint64_t)digit;
    }
    return used;
}

static size_t read_reply(Stream *s, const char *bytes, size_t size, uint64_t now)
{
    size_t used;
    const char *line;
    switch (s->reading) {
    case HEAD:
        return read_head(s, bytes, size);
    case SIZE_LINE:
        return read_size_line(s, bytes, size);
    case CHUNK:
        used = size < s->chunk_left ? size : (size_t)s->chunk_left;
        take_stream(s, bytes, used, now);
        if (!(s->chunk_left -= used))
            s->reading = CHUNK_END;
        return used;
    case CHUNK_END:
    case TRAILER:
        if (!(line = memchr(bytes, '\n', size)))
            return size;
        used = (size_t)(line - bytes) + 1;
        if (s->reading == TRAILER) {
            if (used < size)
                fail_reply("bytes after a reply", line + 1, size - used);
            end_turn(s, now);
        } else {
            s->reading = SIZE_LINE;
            s->has_size = false;
        }
        return used;
    }
    return size;
}

static void read_all(Stream *s)
{
    static char part[READ_SIZE];
    ssize_t n = recv(s->fd, part, sizeof part, 0);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0)
        fail_reply("closed in a reply", s->rest.bytes, s->rest.size);
    uint64_t now = now_ns();
    for (size_t used = 0; used < (size_t)n;)
        used += read_reply(s, part + used, (size_t)n - used, now);
}

/* --- The loop ---------------------------------------------------------------------------------- */

static int by_value(const void *one, const void *other)
{
    float a = *(const float *)one, b = *(const float *)other;
    return a < b ? -1 : a > b;
}

static void tell(const char *name, Samples *s, const char *after)
{
    static const struct { const char *name; double share; } ranks[] = {
        {"min", 0}, {"p50", .5}, {"p90", .9}, {"p99", .99}, {"max", 1},
    };
    if (!s->count)
        fail("nothing was measured");
    qsort(s->values, s->count, sizeof *s->values, by_value);
    printf("\"%s\":{", name);
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        size_t at = (size_t)(ranks[i].share * (double)s->count);
        at = at < s->count ? at : s->count - 1;
        printf("%s\"%s\":%.2f", i ? "," : "", ranks[i].name, (double)s->values[at]);
    }
    printf("}%s", after);
}

static void run(long turns, long skip)
{
    struct epoll_event ready[256];
    event_us.count = first_us.count = turn_us.count = 0;
    deltas = 0;
    skipped = skip;
    running = stream_count;
    uint64_t began = now_ns();
    for (int i = 0; i < stream_count; i++) {
        streams[i].turns_left = turns;
        streams[i].events = 0;
        begin_turn(streams + i);
    }
    while (running) {
        int n = epoll_wait(poller, ready, 256, -1);
        for (int i = 0; i < n; i++) {
            Stream *s = ready[i].data.ptr;
            if (ready[i].events & EPOLLOUT)
                send_more(s);
            if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                read_all(s);
        }
    }
    double wall_s = (double)(now_ns() - began) / 1e9;
    long events = 0;
    for (int i = 0; i < stream_count; i++)
        events += streams[i].events;
    printf("{\"turns\":%zu,\"events\":%ld,\"deltas\":%ld,\"wall_s\":%.6f,\"body_bytes\":%zu,",
           turn_us.count, events, deltas, wall_s, streams[0].body.size);
    tell("turn_us", &turn_us, ",");
    tell("first_us", &first_us, ",");
    tell("event_us", &event_us, "}\n");
    fflush(stdout);
}

static void open_streams(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = htons((uint16_t)port);
    streams = room(NULL, (size_t)stream_count * sizeof *streams);
    memset(streams, 0, (size_t)stream_count * sizeof *streams);
    for (int i = 0; i < stream_count; i++) {
        Stream *s = streams + i;
        s->number = i;
        s->fd = socket(AF_INET, SOCK_STREAM, 0);
        if (s->fd < 0 || connect(s->fd, (void *)&address, sizeof address))
            fail("can't connect");
        int one = 1;
        ioctl(s->fd, FIONBIO, &one);
        no_delay(s->fd);
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = s};
        epoll_ctl(poller, EPOLL_CTL_ADD, s->fd, &e);
    }
}

static Buffer part(const char *folder, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return read_file(path);
}

int main(int count, char **arguments)
{
    if (count != 5 && count != 6)
        return 64;
    is_chat = count == 6;
    signal(SIGPIPE, SIG_IGN);
    port = atoi(arguments[1]);
    stream_count = atoi(arguments[2]);
    per_key = atoi(arguments[3]);
    prefix = part(arguments[4], "prefix");
    suffix = part(arguments[4], "suffix");
    echo = part(arguments[4], "echo");
    item = part(arguments[4], "item");
    poller = epoll_create1(0);
    open_streams();
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "new", 3)) {
            generation++;
            for (int i = 0; i < stream_count; i++)
                begin_conversation(streams + i);
            run(1, 0);
        } else if (!strncmp(line, "turns ", 6)) {
            for (int i = 0; i < stream_count; i++)
                grow_conversation(streams + i);
            char *rest;
            long turns = strtol(line + 6, &rest, 10);
            run(turns, strtol(rest, NULL, 10));
        } else {
            return 64;
        }
    }
    return 0;
}
