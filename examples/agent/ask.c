/* Asks a device one question at its socket, and prints the answer: a line of JSON each.
 *
 *   cc -o ask ask.c
 *   ./ask ~/.fleet/device.sock '{"do": "append", "arrays": {"x": [0.1, 0.2], "y": 1}}'
 */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int main(int count, char **words) {
    struct sockaddr_un place = {.sun_family = AF_UNIX};
    char answer[65536];
    ssize_t size;
    int device;

    if (count != 3 || strlen(words[1]) >= sizeof place.sun_path) {
        fprintf(stderr, "usage: ask SOCKET QUESTION\n");
        return 2;
    }
    strcpy(place.sun_path, words[1]);
    device = socket(AF_UNIX, SOCK_STREAM, 0);
    if (device < 0 || connect(device, (struct sockaddr *)&place, sizeof place) != 0) {
        perror(words[1]);
        return 1;
    }
    if (dprintf(device, "%s\n", words[2]) < 0) {
        perror(words[1]);
        return 1;
    }
    while ((size = read(device, answer, sizeof answer)) > 0) {
        if (fwrite(answer, 1, size, stdout) != (size_t)size)
            return 1;
        if (answer[size - 1] == '\n')
            return 0;
    }
    return 1;
}
