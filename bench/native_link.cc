// Measures the time of an allreduce over TCP loopback, compared with only moving the same bytes.
//
// usage: native_link [ranks=2] [rounds=5] [largest=67108864] [smallest=4]
// Ranks are processes. Each rank rewrites its buffer and waits at a barrier before each timed operation. "wire" is an
// alltoall of as many bytes as the allreduce moves, without arithmetic, in the same round. The ratio is more reliable
// than the times.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/link_collectives.h"
#include "transport/tcp.h"

using namespace farandole;

namespace {

class Deadline final : public Guard {
 public:
  void check() override {
    if (now_ns() > end_) throw Error::timeout("", {}, 300);
  }

 private:
  uint64_t end_ = now_ns() + 300'000'000'000;
};

std::array<int, 2> connected() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  const int client = ::socket(AF_INET, SOCK_STREAM, 0);
  if (::bind(listener, where, size) != 0 || ::listen(listener, 1) != 0 || ::getsockname(listener, where, &size) != 0 ||
      ::connect(client, where, size) != 0)
    throw std::runtime_error("no loopback connection");
  const int server = ::accept(listener, nullptr, nullptr);
  ::close(listener);
  return {client, server};
}

struct Times {
  std::vector<double> allreduce, wire;  // us
};

double at(std::vector<double> values, double quantile) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(quantile * static_cast<double>(values.size() - 1))];
}

/// Blocks until all ranks have called it: each sends a byte to each other one.
void meet(Mesh& mesh) {
  const auto n = static_cast<size_t>(mesh.size());
  std::vector<std::byte> bytes(2 * n);
  std::vector<const std::byte*> in;
  std::vector<std::byte*> out;
  for (size_t rank = 0; rank < n; ++rank) {
    in.push_back(bytes.data() + rank);
    out.push_back(bytes.data() + n + rank);
  }
  const std::vector<size_t> one(n, 1);
  link_alltoall(mesh, in, one, out, one);
}

/// Measures as one rank. All ranks return times; the caller uses those of one rank.
Times measure(Mesh& mesh, size_t bytes, int repeats) {
  const auto n = static_cast<size_t>(mesh.size());
  std::vector<float> data(bytes / sizeof(float));
  const Piece piece{reinterpret_cast<std::byte*>(data.data()), reinterpret_cast<std::byte*>(data.data()), bytes};
  const size_t part = std::max<size_t>(1, 2 * bytes / n);
  std::vector<std::byte> send(part * n), receive(part * n);
  std::vector<const std::byte*> in;
  std::vector<std::byte*> out;
  for (size_t rank = 0; rank < n; ++rank) {
    in.push_back(send.data() + rank * part);
    out.push_back(receive.data() + rank * part);
  }
  const std::vector<size_t> parts(n, part);

  Times times;
  const auto timed = [&](std::vector<double>& into, auto operation) {
    meet(mesh);
    const uint64_t begin = now_ns();
    operation();
    into.push_back(static_cast<double>(now_ns() - begin) / 1000);
  };
  for (int i = 0; i < repeats; ++i) {
    std::fill(data.begin(), data.end(), static_cast<float>(mesh.rank() + i));
    timed(times.allreduce, [&] { link_allreduce(mesh, {&piece, 1}, DType::Float32, {}); });
    std::fill(send.begin(), send.end(), static_cast<std::byte>(i));
    timed(times.wire, [&] { link_alltoall(mesh, in, parts, out, parts); });
  }
  return times;
}

int run(int rank, std::vector<std::unique_ptr<Link>> links, int rounds, size_t smallest, size_t largest) {
  Deadline deadline;
  Mesh mesh(rank, std::move(links), deadline, WaitPolicy{});
  if (rank == 0)
    std::printf("%12s %12s %12s %10s %12s %12s\n", "bytes", "p50 us", "min us", "GB/s", "wire p50", "wire/ours");
  for (size_t bytes = smallest; bytes <= largest; bytes *= 4) {
    const int repeats = static_cast<int>(std::clamp<size_t>((size_t{32} << 20) / bytes, 5, 300));
    std::vector<double> p50, least, wire, ratio;
    (void)measure(mesh, bytes, 2);
    for (int round = 0; round < rounds; ++round) {
      const Times times = measure(mesh, bytes, repeats);
      p50.push_back(at(times.allreduce, 0.5));
      least.push_back(at(times.allreduce, 0));
      wire.push_back(at(times.wire, 0.5));
      ratio.push_back(wire.back() / p50.back());
    }
    if (rank == 0)
      std::printf("%12zu %12.1f %12.1f %10.2f %12.1f %12.2f\n", bytes, at(p50, 0.5), at(least, 0),
                  static_cast<double>(bytes) / at(p50, 0.5) / 1000, at(wire, 0.5), at(ratio, 0.5));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::max(2, std::atoi(argv[1])) : 2;
  const int rounds = argc > 2 ? std::max(1, std::atoi(argv[2])) : 5;
  const size_t largest = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : size_t{64} << 20;
  const size_t smallest = argc > 4 ? std::max<size_t>(4, std::strtoull(argv[4], nullptr, 10)) : 4;
  const auto n = static_cast<size_t>(ranks);
  std::vector<std::vector<int>> fds(n, std::vector<int>(n, -1));
  for (size_t a = 0; a < n; ++a) {
    for (size_t b = a + 1; b < n; ++b) {
      const auto both = connected();
      fds[a][b] = both[0];
      fds[b][a] = both[1];
    }
  }
  int rank = 0;
  for (int child = 1; child < ranks && rank == 0; ++child)
    if (::fork() == 0) rank = child;
  std::vector<std::unique_ptr<Link>> links(n);
  for (size_t a = 0; a < n; ++a) {
    for (size_t b = 0; b < n; ++b) {
      if (a == b) continue;
      if (static_cast<int>(a) == rank) links[b] = std::make_unique<TcpLink>(static_cast<int>(b), fds[a][b]);
      else ::close(fds[a][b]);
    }
  }
  try {
    run(rank, std::move(links), rounds, smallest, largest);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
  int failed = 0;
  if (rank == 0)
    for (int status = 0; ::wait(&status) > 0;) failed += status != 0 ? 1 : 0;
  return failed == 0 ? 0 : 1;
}
