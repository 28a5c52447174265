// Heartbeats between hosts: every rank notices a host that falls silent, and a rank that was stopped does not take
// others for lost.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "engine/silence.h"
#include "engine_ranks.h"

using namespace ranks;
using farandole::ErrorKind;
using farandole::Silence;
using std::chrono::milliseconds;

namespace {

constexpr uint64_t kMs = 1'000'000;

void test_silence_is_measured_while_we_look() {
  Silence silence(1000 * kMs);
  uint64_t now = 77;
  const auto look_for = [&](uint64_t ms, uint64_t every) {
    for (uint64_t t = 0; t < ms; t += every) silence.look(now += every * kMs);
  };
  look_for(5000, 100);
  CHECK(!silence.is_over_limit());  // silence is measured from the first sign of life
  silence.note_life();
  look_for(900, 100);
  CHECK(!silence.is_over_limit());
  CHECK_EQ(silence.left(), 100 * kMs);
  silence.note_life();
  look_for(1000, 250);
  CHECK(silence.is_over_limit() && silence.left() == 0);
  // A gap without checks counts for at most a quarter: after a minute's stop there is time to read.
  silence.note_life();
  look_for(250, 50);
  silence.look(now += 60'000 * kMs);
  CHECK_EQ(silence.left(), 500 * kMs);
  look_for(400, 100);
  CHECK(!silence.is_over_limit());
  look_for(100, 100);
  CHECK(silence.is_over_limit());
}

void test_silence_counts_what_was_looked_at() {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const uint64_t limit = 100 + random() % 1000;
    Silence silence(limit);
    uint64_t now = random();
    uint64_t expected = 0;
    silence.look(now);
    silence.note_life();
    for (int i = 0; i < 100; ++i) {
      const uint64_t gap = random() % (limit / 3);
      silence.look(now += gap);
      expected += std::min(gap, limit / 4);
      if (random() % 10 == 0) silence.note_life(), expected = 0;
      CHECK_EQ(silence.is_over_limit(), expected >= limit);
      CHECK_EQ(silence.left(), expected >= limit ? 0 : limit - expected);
    }
  }
}

// A network between ranks of different hosts. After one host is cut off, its bytes are dropped both ways, and no
// connection ends.
class Network {
 public:
  Network(std::vector<Wiring>& wirings, const std::vector<int>& hosts) : hosts_(hosts), stop_(eventfd(0, 0)) {
    for (Wiring& wiring : wirings) {
      for (Wiring::Remote& remote : wiring.remotes) {
        if (remote.peer < wiring.rank) continue;
        for (Descriptor* descriptor : {&remote.control, &remote.data})
          if (descriptor->is_open()) reroute(*descriptor, wiring.rank, remote.peer);
      }
    }
    thread_ = std::thread(&Network::carry, this);
  }
  ~Network() {
    eventfd_write(stop_, 1);
    thread_.join();
    for (const Pipe& pipe : pipes_) close(pipe.from);
    close(stop_);
  }
  void cut_off(int host) { cut_off_.store(host); }

 private:
  struct Pipe {
    int from, to;
    int source, target;  // hosts
  };

  void reroute(Descriptor& end, int rank, int peer) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) std::abort();
    const int inside = end.release();
    end = Descriptor(pair[0]);
    const int here = hosts_[static_cast<size_t>(rank)];
    const int there = hosts_[static_cast<size_t>(peer)];
    pipes_.push_back({pair[1], inside, here, there});
    pipes_.push_back({inside, pair[1], there, here});
  }

  void carry() {
    std::vector<pollfd> fds{{stop_, POLLIN, 0}};
    for (const Pipe& pipe : pipes_) fds.push_back({pipe.from, POLLIN, 0});
    std::array<char, 65536> bytes;
    for (;;) {
      poll(fds.data(), fds.size(), -1);
      if (fds[0].revents != 0) return;
      for (size_t i = 1; i < fds.size(); ++i) {
        const Pipe& pipe = pipes_[i - 1];
        if (fds[i].revents == 0) continue;
        const ssize_t got = recv(pipe.from, bytes.data(), bytes.size(), MSG_DONTWAIT);
        const bool lost = pipe.source == cut_off_.load() || pipe.target == cut_off_.load();
        if (got <= 0) fds[i].fd = -1;
        if (lost) continue;
        if (got <= 0) shutdown(pipe.to, SHUT_WR);
        for (ssize_t at = 0; at < got;) {
          const ssize_t sent = send(pipe.to, bytes.data() + at, static_cast<size_t>(got - at), MSG_NOSIGNAL);
          if (sent <= 0) break;
          at += sent;
        }
      }
    }
  }

  std::vector<int> hosts_;
  std::vector<Pipe> pipes_;
  std::atomic<int> cut_off_{-1};
  int stop_;
  std::thread thread_;
};

// Runs `body` for every rank, with a network between the hosts; returns each rank's exception.
std::vector<std::optional<Error>> run_on_network(const std::vector<int>& hosts, size_t degree, milliseconds heartbeat,
                                                 const std::function<void(Engine&, Network&)>& body) {
  std::vector<Wiring> wirings = wire(hosts, degree);
  Network network(wirings, hosts);
  std::vector<std::optional<Error>> errors(hosts.size());
  std::vector<std::thread> threads;
  std::atomic<int> done{0};
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    threads.emplace_back([&, rank] {
      EngineOptions settings = options();
      settings.heartbeat = heartbeat;
      Engine engine(std::move(wirings[rank]), settings);
      try {
        body(engine, network);
      } catch (const Error& error) {
        errors[rank] = error;
      }
      // No rank leaves before all have the error, because a departure would be news.
      for (++done; done.load() < static_cast<int>(hosts.size());) std::this_thread::sleep_for(milliseconds(1));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void reduce_until(Engine& engine, std::chrono::steady_clock::time_point end, size_t elements) {
  for (int step = 0; std::chrono::steady_clock::now() < end; ++step) {
    std::vector<float> values(elements, 1.0f);
    run_now(engine, sum("x" + std::to_string(step % 3), values));
  }
}

void test_a_host_that_vanishes_is_named_by_all() {
  struct Case {
    std::vector<int> hosts;
    size_t degree;
    int host;
    std::set<int> named;  // by the ranks of other hosts
    size_t elements;
  };
  const std::vector<Case> cases{
      {{0, 1}, 8, 1, {1}, 10},
      {{0, 1}, 8, 0, {0}, 100'000},
      {{0, 0, 1, 1}, 8, 1, {2}, 100'000},
      {{0, 1, 0, 1, 2}, 8, 1, {1}, 10},
      // A chain of hosts: ranks behind the vanished one have lost their path to the coordinator.
      {{0, 1, 2, 3}, 1, 3, {3}, 10},
      {{0, 1, 2, 3}, 1, 1, {1}, 1000},
  };
  for (const Case& one : cases) {
    const auto begin = std::chrono::steady_clock::now();
    const auto errors = run_on_network(one.hosts, one.degree, milliseconds(500), [&](Engine& engine, Network& network) {
      if (engine.rank() == 0) {
        reduce_until(engine, std::chrono::steady_clock::now() + milliseconds(100), one.elements);
        network.cut_off(one.host);
      }
      reduce_until(engine, std::chrono::steady_clock::now() + std::chrono::seconds(30), one.elements);
    });
    const std::string which = "host " + std::to_string(one.host) + " of " + std::to_string(one.hosts.size()) + " ranks";
    for (size_t rank = 0; rank < errors.size(); ++rank) {
      check::that(errors[rank] && errors[rank]->kind == ErrorKind::PeerLost, "the loss is noticed", which);
      if (!errors[rank] || one.hosts[rank] == one.host) continue;
      check::that(one.named.contains(errors[rank]->rank), "who vanished is named", which + ": " + errors[rank]->what());
      check::that(errors[rank]->reason.starts_with("no sign of life for 0.5 s"), "why", errors[rank]->what());
    }
    check::that(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15), "noticed in time", which);
  }
}

// Blocks until `ranks` ranks have arrived. Not an operation, whose last bytes the cut could hit.
void meet(std::atomic<int>& come, int ranks) {
  for (++come; come.load() < ranks;) std::this_thread::sleep_for(milliseconds(1));
}

void test_ranks_that_wait_hear_it_also_when_their_parent_computes() {
  const std::vector<int> hosts{0, 1, 2};
  std::atomic<int> come{0};
  std::atomic<int> failed{0};
  const auto errors = run_on_network(hosts, 1, milliseconds(500), [&](Engine& engine, Network& network) {
    std::vector<float> values(10, 1.0f);
    run_now(engine, sum("all are here", values));
    meet(come, 3);
    if (engine.rank() == 0) {
      try {
        run_now(engine, sum("never", values));
      } catch (const Error&) {
        ++failed;
        throw;
      }
    }
    if (engine.rank() == 2) network.cut_off(2);
    // Neither rank makes a request.
    for (int i = 0; i < 20'000 && failed.load() == 0; ++i) std::this_thread::sleep_for(milliseconds(1));
  });
  check::that(errors[0] && errors[0]->kind == ErrorKind::PeerLost, "rank 0 hears of it");
  if (errors[0]) check::equal(errors[0]->rank, 2, errors[0]->what());
}

void test_who_idles_or_starts_late_is_not_lost() {
  const std::vector<int> hosts{0, 0, 1, 2};
  std::vector<Wiring> wirings = wire(hosts, 1);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        if (rank == 2) std::this_thread::sleep_for(milliseconds(2500));
        EngineOptions settings = options();
        settings.heartbeat = milliseconds(1000);
        Engine engine(std::move(wirings[rank]), settings);
        for (int step = 0; step < 3; ++step) {
          std::vector<float> values(10, 1.0f);
          run_now(engine, sum("x", values));
          if (step == 1) std::this_thread::sleep_for(milliseconds(2500));
        }
      } catch (const Error& error) {
        check::that(false, "nobody is lost", error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void test_without_heartbeat_silence_is_endured() {
  std::atomic<int> come{0};
  const auto errors = run_on_network({0, 1}, 8, milliseconds(0), [&](Engine& engine, Network& network) {
    std::vector<float> values(10, 1.0f);
    run_now(engine, sum("x", values));
    meet(come, 2);
    network.cut_off(1);
    const OperationPtr never = sum("y", values);
    engine.submit(never, false);
    check::that(!engine.wait(*never, milliseconds(1200)), "it waits");
  });
  check::that(!errors[0] && !errors[1], "nobody is lost");
}

}  // namespace

int main() {
  test_silence_is_measured_while_we_look();
  test_silence_counts_what_was_looked_at();
  test_a_host_that_vanishes_is_named_by_all();
  test_ranks_that_wait_hear_it_also_when_their_parent_computes();
  test_who_idles_or_starts_late_is_not_lost();
  test_without_heartbeat_silence_is_endured();
  return check::report();
}
