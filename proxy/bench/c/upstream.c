/*
 * The upstream of the benchmark: answers Responses turns over HTTP (SSE) and over WebSocket, from
 * one thread, fast enough not to be what gets measured.
 *
 *   usage: upstream TEMPLATES [CERTIFICATE]
 *
 * It prints the port it listens on, then serves until it is ended. With a CERTIFICATE (a PEM file:
 * key and chain; only if compiled WITH_TLS) it listens on a second port, printed in a second line,
 * where all is the same behind TLS.
 *
 *   POST /...                      reads the body, answers an SSE stream: one turn
 *   GET, Upgrade: websocket        every text message is a turn
 *   GET /plan?events=N&rate=R      what turns are like from now on: N events (at least 3), R a
 *                                  second and stream, 0 for as fast as the socket takes them
 *   GET /stats                     what was received so far, as JSON
 *
 * TEMPLATES has four lines, the events of a turn: created, delta (as often as the plan asks for),
 * output_item.done, completed. Ids, sequence numbers and time stamps in them are placeholders that
 * are patched in place; see common.h.
 *
 * A message that names the connection's latest response as `previous_response_id` counts as a
 * delta; one that names anything else counts as stray, and should never be seen.
 */
#define _GNU_SOURCE
#include "common.h"
#ifdef WITH_TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#else
typedef void SSL;
#endif

enum { CREATED, DELTA, ITEM, COMPLETED, EVENTS };
enum { START = 256, HEAD_LIMIT = 65536, SEND_AT = 65536, MARKS = 8 };

/* --- Events, ready to be copied and patched ---------------------------------------------------- */

typedef struct {
    char *bytes;
    size_t size;
    int stamp, number, responses[MARKS], response_count, items[MARKS], item_count;
} Form;

static Form as_sse[EVENTS], as_frame[EVENTS];

static int find_marks(Form *form, const char *mark, int *places)
{
    int count = 0;
    size_t from = 0, length = strlen(mark);
    char *at;
    while ((at = memmem(form->bytes + from, form->size - from, mark, length)) && count < MARKS) {
        places[count++] = (int)(at - form->bytes);
        from = (size_t)(at - form->bytes) + length;
    }
    return count;
}

static Form made(Buffer b)
{
    Form form = {.bytes = b.bytes, .size = b.size};
    int place[MARKS];
    form.stamp = find_marks(&form, STAMP_MARK, place) ? place[0] : -1;
    form.number = find_marks(&form, NUMBER_MARK, place) ? place[0] : -1;
    if (form.stamp < 0 || form.number < 0)
        fail("a template lacks its placeholders");
    form.response_count = find_marks(&form, RESPONSE_MARK, form.responses);
    form.item_count = find_marks(&form, ITEM_MARK, form.items);
    return form;
}

static void load_event(int event, const char *json, size_t size)
{
    char text[128];
    const char *type = json + strlen("{\"type\":\"");
    int name = (int)((char *)memchr(type, '"', size) - type);
    Buffer sse = {0}, frame = {0};
    size_t chunk = strlen("event: \ndata: \n\n") + (size_t)name + size;
    append(&sse, text, (size_t)sprintf(text, "%zx\r\nevent: %.*s\ndata: ", chunk, name, type));
    append(&sse, json, size);
    append(&sse, "\n\n\r\n", 4);
    if (event == COMPLETED)
        append(&sse, "0\r\n\r\n", 5);
    as_sse[event] = made(sse);
    unsigned char head[10] = {0x81, 0};
    int length = size < 126 ? 2 : size < 65536 ? 4 : 10;
    head[1] = (unsigned char)(length == 2 ? size : length == 4 ? 126 : 127);
    for (int i = length - 1, shift = 0; i >= 2; i--, shift += 8)
        head[i] = (unsigned char)(size >> shift);
    append(&frame, head, (size_t)length);
    append(&frame, json, size);
    as_frame[event] = made(frame);
}

static void load_events(const char *path)
{
    Buffer file = read_file(path);
    char *line = file.bytes, *end = file.bytes + file.size;
    for (int event = 0; event < EVENTS; event++) {
        char *stop = line < end ? memchr(line, '\n', (size_t)(end - line)) : NULL;
        if (!stop)
            fail("four lines of templates are needed");
        load_event(event, line, (size_t)(stop - line));
        line = stop + 1;
    }
}

/* --- Connections ------------------------------------------------------------------------------- */

enum Reading { HEAD, BODY, FRAME_HEAD, FRAME };

typedef struct Connection {
    int fd;
    SSL *tls;                          /* NULL on the plain port */
    enum Reading reading;
    bool sse, wants_out, is_gone;
    Buffer head;                       /* of a request, until it is complete */
    unsigned char frame_head[14], mask[4];
    int frame_head_size, opcode;
    bool is_final;
    uint64_t left, taken;              /* of the body or frame that is being read */
    char start[START + 1];             /* how the message (or control frame) begins */
    size_t start_size;
    bool is_active;                    /* a turn is being answered */
    long event, events;
    uint64_t gap_ns, due_ns, response;
    Buffer out;
    size_t written;
} Connection;

static int poller;
static long plan_events = 3, plan_rate = 0;
static struct { uint64_t bytes, turns, deltas, strays, upgrades, overlaps; } stats;
static Connection **paced;
static size_t paced_count, paced_space;
static uint64_t last_response;

/* --- The socket, behind TLS or not: like send() and recv() ------------------------------------- */

#ifdef WITH_TLS
static SSL_CTX *tls_context;

static ssize_t told(Connection *c, int n)
{
    if (n > 0)
        return n;
    int why = SSL_get_error(c->tls, n);
    errno = why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE ? EAGAIN : EIO;
    ERR_clear_error();
    return why == SSL_ERROR_ZERO_RETURN ? 0 : -1;
}

static ssize_t put(Connection *c, const char *bytes, size_t size)
{
    return c->tls ? told(c, SSL_write(c->tls, bytes, (int)size))
                  : send(c->fd, bytes, size, MSG_NOSIGNAL);
}

static ssize_t get(Connection *c, char *bytes, size_t size)
{
    return c->tls ? told(c, SSL_read(c->tls, bytes, (int)size)) : recv(c->fd, bytes, size, 0);
}

static void prepare_tls(const char *certificate)
{
    tls_context = SSL_CTX_new(TLS_server_method());
    if (!tls_context || SSL_CTX_use_certificate_chain_file(tls_context, certificate) != 1 ||
        SSL_CTX_use_PrivateKey_file(tls_context, certificate, SSL_FILETYPE_PEM) != 1) {
        ERR_print_errors_fp(stderr);
        fail("no use for the certificate");
    }
    SSL_CTX_set_mode(tls_context,
                     SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
}

static void begin_tls(Connection *c)
{
    c->tls = SSL_new(tls_context);
    if (!c->tls || SSL_set_fd(c->tls, c->fd) != 1)
        fail("no TLS for a connection");
    SSL_set_accept_state(c->tls); /* the first reads shake hands */
}

static void end_tls(SSL *tls)
{
    SSL_free(tls);
}
#else
static ssize_t put(Connection *c, const char *bytes, size_t size)
{
    return send(c->fd, bytes, size, MSG_NOSIGNAL);
}

static ssize_t get(Connection *c, char *bytes, size_t size)
{
    return recv(c->fd, bytes, size, 0);
}

static void prepare_tls(const char *certificate)
{
    fail(certificate);
}

static void begin_tls(Connection *c)
{
    c->is_gone = true;
}

static void end_tls(SSL *tls)
{
    (void)tls;
}
#endif

static void want_out(Connection *c, bool wanted)
{
    if (c->wants_out == wanted)
        return;
    c->wants_out = wanted;
    struct epoll_event e = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0u), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}

static void unpace(Connection *c)
{
    for (size_t i = 0; i < paced_count; i++)
        if (paced[i] == c) {
            paced[i] = paced[--paced_count];
            return;
        }
}

static void drop(Connection *c)
{
    unpace(c);
    end_tls(c->tls);
    close(c->fd);
    free(c->head.bytes);
    free(c->out.bytes);
    free(c);
}

static void flush(Connection *c)
{
    while (c->written < c->out.size) {
        ssize_t n = put(c, c->out.bytes + c->written, c->out.size - c->written);
        if (n < 0) {
            if (errno == EAGAIN)
                want_out(c, true);
            else
                c->is_gone = true;
            return;
        }
        c->written += (size_t)n;
    }
    c->written = c->out.size = 0;
    want_out(c, false);
}

static void say(Connection *c, const char *text)
{
    append(&c->out, text, strlen(text));
    flush(c);
}

/* --- Answering --------------------------------------------------------------------------------- */

static void write_event(Connection *c)
{
    int event = c->event == 0              ? CREATED
                : c->event == c->events - 1 ? COMPLETED
                : c->event == c->events - 2 ? ITEM
                                            : DELTA;
    const Form *form = c->sse ? &as_sse[event] : &as_frame[event];
    reserve(&c->out, form->size);
    char *to = c->out.bytes + c->out.size;
    memcpy(to, form->bytes, form->size);
    put_digits(to + form->stamp, STAMP_BASE + now_ns(), STAMP_DIGITS, 10);
    put_digits(to + form->number, NUMBER_BASE + (uint64_t)c->event, NUMBER_DIGITS, 10);
    for (int i = 0; i < form->response_count; i++)
        put_digits(to + form->responses[i] + strlen("resp_"), c->response, ID_DIGITS, 16);
    for (int i = 0; i < form->item_count; i++)
        put_digits(to + form->items[i] + strlen("msg_"), c->response, ID_DIGITS, 16);
    c->out.size += form->size;
    if (++c->event == c->events) {
        c->is_active = false;
        if (c->gap_ns)
            unpace(c);
    }
}

/* Write a burst until the turn ends or the socket is full. */
static void pump(Connection *c)
{
    while (c->is_active && !c->is_gone && !c->wants_out) {
        while (c->is_active && c->out.size < SEND_AT)
            write_event(c);
        flush(c);
    }
}

static void begin_turn(Connection *c)
{
    if (c->is_active) {
        stats.overlaps++;
        return;
    }
    stats.turns++;
    c->is_active = true;
    c->event = 0;
    c->events = plan_events;
    c->response = ++last_response;
    c->gap_ns = plan_rate ? 1000000000ull / (uint64_t)plan_rate : 0;
    if (c->sse) {
        const char *head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                           "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";
        append(&c->out, head, strlen(head));
    }
    if (!c->gap_ns) {
        pump(c);
        return;
    }
    if (paced_count == paced_space)
        paced = room(paced, (paced_space = paced_space * 2 + 64) * sizeof *paced);
    paced[paced_count++] = c;
    write_event(c);
    flush(c);
    /* A random phase, so that streams which began together do not march in step. */
    c->due_ns = now_ns() + c->gap_ns / 2 + (uint64_t)rand() % c->gap_ns;
}

/* Write what is due; return when the next event of any stream is, or UINT64_MAX. */
static uint64_t write_due(void)
{
    uint64_t next = UINT64_MAX, now = now_ns();
    for (size_t i = 0; i < paced_count;) {
        Connection *c = paced[i];
        bool wrote = false;
        while (c->is_active && c->due_ns <= now) {
            write_event(c);
            c->due_ns += c->gap_ns;
            wrote = true;
        }
        if (wrote && !c->wants_out)
            flush(c);
        if (!c->is_active)
            continue; /* another one stands at this place now */
        if (c->due_ns < next)
            next = c->due_ns;
        i++;
    }
    return next;
}

/* --- Requests ---------------------------------------------------------------------------------- */

static uint32_t rotated(uint32_t value, int by)
{
    return value << by | value >> (32 - by);
}

/* SHA-1 of less than 119 bytes, for the handshake alone (RFC 6455, section 4.2.2). */
static void sha1(const unsigned char *message, size_t size, unsigned char *digest)
{
    uint32_t h[5] = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};
    unsigned char padded[128] = {0};
    memcpy(padded, message, size);
    padded[size] = 0x80;
    size_t total = (size + 8) / 64 * 64 + 64;
    for (int i = 0; i < 8; i++)
        padded[total - 1 - (size_t)i] = (unsigned char)((uint64_t)size * 8 >> (8 * i));
    for (size_t at = 0; at < total; at += 64) {
        uint32_t w[80], a = h[0], b = h[1], c = h[2], d = h[3], e = h[4];
        for (int i = 0; i < 16; i++) {
            const unsigned char *p = padded + at + 4 * i;
            w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
        }
        for (int i = 16; i < 80; i++)
            w[i] = rotated(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
        for (int i = 0; i < 80; i++) {
            uint32_t f = i < 20   ? ((b & c) | (~b & d)) + 0x5A827999
                         : i < 40 ? (b ^ c ^ d) + 0x6ED9EBA1
                         : i < 60 ? ((b & c) | (b & d) | (c & d)) + 0x8F1BBCDC
                                  : (b ^ c ^ d) + 0xCA62C1D6;
            uint32_t t = rotated(a, 5) + f + e + w[i];
            e = d, d = c, c = rotated(b, 30), b = a, a = t;
        }
        h[0] += a, h[1] += b, h[2] += c, h[3] += d, h[4] += e;
    }
    for (int i = 0; i < 20; i++)
        digest[i] = (unsigned char)(h[i / 4] >> (24 - 8 * (i % 4)));
}

static void base64(const unsigned char *bytes, int size, char *text)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < size; i += 3) {
        uint32_t v = (uint32_t)bytes[i] << 16;
        v |= i + 1 < size ? (uint32_t)bytes[i + 1] << 8 : 0;
        v |= i + 2 < size ? bytes[i + 2] : 0;
        *text++ = digits[v >> 18 & 63];
        *text++ = digits[v >> 12 & 63];
        *text++ = i + 1 < size ? digits[v >> 6 & 63] : '=';
        *text++ = i + 2 < size ? digits[v & 63] : '=';
    }
    *text = 0;
}

static void upgrade(Connection *c, const char *key)
{
    char secret[100], accept[32], reply[256];
    unsigned char digest[20];
    int length = (int)strcspn(key, "\r\n ");
    if (length > 40)
        length = 40;
    int size = sprintf(secret, "%.*s258EAFA5-E914-47DA-95CA-C5AB0DC85B11", length, key);
    sha1((unsigned char *)secret, (size_t)size, digest);
    base64(digest, 20, accept);
    sprintf(reply,
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Accept: %s\r\n\r\n",
            accept);
    stats.upgrades++;
    c->reading = FRAME_HEAD;
    c->sse = false;
    say(c, reply);
}

static void answer_json(Connection *c, const char *json)
{
    char reply[512];
    sprintf(reply, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
            strlen(json), json);
    say(c, reply);
}

static void tell_stats(Connection *c)
{
    char json[320];
    sprintf(json,
            "{\"bytes\":%llu,\"turns\":%llu,\"deltas\":%llu,\"strays\":%llu,\"upgrades\":%llu,"
            "\"overlaps\":%llu}",
            (unsigned long long)stats.bytes, (unsigned long long)stats.turns,
            (unsigned long long)stats.deltas, (unsigned long long)stats.strays,
            (unsigned long long)stats.upgrades, (unsigned long long)stats.overlaps);
    answer_json(c, json);
}

static void set_plan(Connection *c, const char *query)
{
    const char *events = strstr(query, "events="), *rate = strstr(query, "rate=");
    if (events)
        plan_events = atol(events + strlen("events="));
    if (rate)
        plan_rate = atol(rate + strlen("rate="));
    if (plan_events < 3)
        plan_events = 3;
    answer_json(c, "{}");
}

static void take_request(Connection *c)
{
    const char *head = c->head.bytes, *value;
    if ((value = header(head, "\nsec-websocket-key:")))
        upgrade(c, value);
    else if (!strncmp(head, "GET /plan", 9))
        set_plan(c, head);
    else if (!strncmp(head, "GET /stats", 10))
        tell_stats(c);
    else {
        value = header(head, "\ncontent-length:");
        c->left = value ? strtoull(value, NULL, 10) : 0;
        c->reading = BODY;
        c->sse = true;
    }
}

/* --- Reading ----------------------------------------------------------------------------------- */

static size_t read_head(Connection *c, const char *bytes, size_t size)
{
    size_t old = c->head.size, from = old > 3 ? old - 3 : 0;
    append(&c->head, bytes, size);
    char *end = memmem(c->head.bytes + from, c->head.size - from, "\r\n\r\n", 4);
    if (!end) {
        c->is_gone = c->head.size > HEAD_LIMIT;
        return size;
    }
    size_t used = (size_t)(end - c->head.bytes) + 4 - old;
    end[2] = 0;
    c->head.size = 0;
    take_request(c);
    return used;
}

static size_t read_body(Connection *c, size_t size)
{
    size_t used = size < c->left ? size : (size_t)c->left;
    c->left -= used;
    stats.bytes += used;
    if (!c->left) {
        c->reading = HEAD;
        begin_turn(c);
    }
    return used;
}

static size_t read_frame_head(Connection *c, const char *bytes, size_t size)
{
    size_t used = 0;
    while (used < size) {
        c->frame_head[c->frame_head_size++] = (unsigned char)bytes[used++];
        if (c->frame_head_size < 2)
            continue;
        unsigned char *h = c->frame_head;
        int extra = (h[1] & 127) == 126 ? 2 : (h[1] & 127) == 127 ? 8 : 0;
        int masked = h[1] & 128 ? 4 : 0;
        if (c->frame_head_size < 2 + extra + masked)
            continue;
        c->left = extra ? 0 : h[1] & 127u;
        for (int i = 0; i < extra; i++)
            c->left = c->left << 8 | h[2 + i];
        memset(c->mask, 0, 4);
        memcpy(c->mask, h + 2 + extra, (size_t)masked);
        c->is_final = h[0] & 128;
        c->opcode = h[0] & 15;
        c->taken = 0;
        if (c->opcode)
            c->start_size = 0; /* a new message, not the next part of one */
        c->frame_head_size = 0;
        c->reading = FRAME;
        break;
    }
    return used;
}

static void note_chain(Connection *c)
{
    char *at = strstr(c->start, "\"previous_response_id\":");
    if (!at)
        return;
    at += strlen("\"previous_response_id\":");
    while (*at == ' ')
        at++;
    if (strncmp(at, "\"resp_", 6))
        return;
    if (strtoull(at + 6, NULL, 16) == c->response && c->response)
        stats.deltas++;
    else
        stats.strays++;
}

static void end_frame(Connection *c)
{
    c->reading = FRAME_HEAD;
    c->start[c->start_size] = 0;
    if (c->opcode == 8) {
        c->is_gone = true;
    } else if (c->opcode == 9) {
        char pong[2] = {(char)0x8a, (char)c->start_size};
        append(&c->out, pong, 2);
        append(&c->out, c->start, c->start_size);
        flush(c);
    } else if (c->opcode < 3 && c->is_final) {
        note_chain(c);
        begin_turn(c);
    }
}

static size_t read_frame(Connection *c, const char *bytes, size_t size)
{
    size_t used = size < c->left ? size : (size_t)c->left;
    for (size_t i = 0; i < used && c->start_size < START; i++)
        c->start[c->start_size++] = (char)(bytes[i] ^ c->mask[(c->taken + i) & 3]);
    c->taken += used;
    c->left -= used;
    if (c->opcode < 3)
        stats.bytes += used;
    if (!c->left)
        end_frame(c);
    return used;
}

static void take(Connection *c, const char *bytes, size_t size)
{
    while (!c->is_gone) {
        bool is_empty_step = (c->reading == BODY || c->reading == FRAME) && !c->left;
        if (!size && !is_empty_step)
            return;
        size_t used = c->reading == HEAD         ? read_head(c, bytes, size)
                      : c->reading == BODY       ? read_body(c, size)
                      : c->reading == FRAME_HEAD ? read_frame_head(c, bytes, size)
                                                 : read_frame(c, bytes, size);
        bytes += used;
        size -= used;
    }
}

static void read_all(Connection *c)
{
    static char part[1 << 18];
    for (;;) {
        ssize_t n = get(c, part, sizeof part);
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            c->is_gone = true;
            return;
        }
        take(c, part, (size_t)n);
        if (c->is_gone || ((size_t)n < sizeof part && !c->tls))
            return; /* TLS may hold more than it gave: it says itself when there is none */
    }
}

/* --- The loop ---------------------------------------------------------------------------------- */

static int listener(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (void *)&address, size) || listen(fd, 4096) ||
        getsockname(fd, (void *)&address, &size))
        fail("can't listen");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

static void accept_all(int fd, bool is_tls)
{
    for (int got; (got = accept4(fd, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        Connection *c = room(NULL, sizeof *c);
        memset(c, 0, sizeof *c);
        c->fd = got;
        no_delay(got);
        if (is_tls)
            begin_tls(c);
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_ADD, got, &e);
    }
}

static void serve_one(Connection *c, uint32_t events)
{
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        read_all(c);
    if (!c->is_gone && events & EPOLLOUT) {
        flush(c);
        if (!c->wants_out && !c->gap_ns)
            pump(c);
    }
    if (c->is_gone)
        drop(c);
}

int main(int count, char **arguments)
{
    if (count != 2 && count != 3)
        return 64;
    signal(SIGPIPE, SIG_IGN);
    load_events(arguments[1]);
    poller = epoll_create1(0);
    int fds[2];
    struct epoll_event ready[256];
    for (int i = 0; i < count - 1; i++) {
        if (i)
            prepare_tls(arguments[2]);
        fds[i] = listener();
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = &fds[i]};
        epoll_ctl(poller, EPOLL_CTL_ADD, fds[i], &e);
    }
    for (;;) {
        uint64_t next = write_due(), now = now_ns(), wait = next > now ? next - now : 0;
        struct timespec pause = {(time_t)(wait / 1000000000), (long)(wait % 1000000000)};
        int n = epoll_pwait2(poller, ready, 256, next == UINT64_MAX ? NULL : &pause, NULL);
        for (int i = 0; i < n; i++) {
            void *of = ready[i].data.ptr;
            if (of == &fds[0] || of == &fds[1])
                accept_all(*(int *)of, of == &fds[1]);
            else
                serve_one(of, ready[i].events);
        }
    }
}
