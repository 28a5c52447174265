// Messages between two ranks: what takes which, in what order, beside collectives, and when a rank is late or gone.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/transfers.h"
#include "engine_ranks.h"

using namespace ranks;
using farandole::ErrorKind;
using farandole::kAnyRank;
using farandole::Transfer;
using farandole::TransferPtr;

namespace {

const std::vector<std::vector<int>> kWorlds = {{0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 1}, {0, 1, 0, 1}};
constexpr size_t kLarge = 400'000;  // floats: more than a ring holds

TransferPtr post(Engine& engine, bool sends, std::vector<float>& values, int peer, uint32_t tag = 0) {
  const auto transfer = std::make_shared<Transfer>();
  transfer->request.name = sends ? "send" : "recv";
  transfer->request.dtype = DType::Float32;
  transfer->request.shape = {static_cast<int64_t>(values.size())};
  transfer->input = transfer->output = reinterpret_cast<std::byte*>(values.data());
  transfer->peer = peer;
  transfer->tag = tag;
  transfer->sends = sends;
  engine.post(transfer);
  return transfer;
}

void send(Engine& engine, std::vector<float> values, int peer, uint32_t tag = 0) {
  finish(engine, post(engine, true, values, peer, tag));
}

std::vector<float> receive(Engine& engine, size_t count, int peer, uint32_t tag = 0) {
  std::vector<float> values(count, -1.0f);
  finish(engine, post(engine, false, values, peer, tag));
  return values;
}

/// Every rank sends to every other rank, in one order everywhere, so that a rank both sends and receives at once.
void all_pairs(Engine& engine) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{8192}, size_t{8193}, kLarge}) {
    std::vector<std::vector<float>> out, in;
    for (int peer = 0; peer < engine.size(); ++peer) {
      out.emplace_back(count, static_cast<float>(100 * engine.rank() + peer));
      in.emplace_back(count, -1.0f);
    }
    std::vector<OperationPtr> under_way;
    for (int peer = 0; peer < engine.size(); ++peer) {
      if (peer == engine.rank()) continue;
      under_way.push_back(post(engine, true, out[static_cast<size_t>(peer)], peer));
      under_way.push_back(post(engine, false, in[static_cast<size_t>(peer)], peer));
    }
    for (const OperationPtr& each : under_way) finish(engine, each);
    for (int peer = 0; peer < engine.size(); ++peer)
      if (peer != engine.rank())
        CHECK(in[static_cast<size_t>(peer)] ==
              std::vector<float>(count, static_cast<float>(100 * peer + engine.rank())));
  }
}

/// Messages of one tag keep their order; a receive passes over those of other tags, large ones too.
void order_and_tags(Engine& engine) {
  if (engine.rank() > 1) return;
  if (engine.rank() == 0) {
    std::vector<float> first(kLarge, 1.0f), second(3, 2.0f), third(kLarge, 3.0f), fourth(3, 4.0f);
    std::vector<TransferPtr> sent{post(engine, true, first, 1, 7), post(engine, true, second, 1, 8),
                                  post(engine, true, third, 1, 7), post(engine, true, fourth, 1, 7)};
    for (const TransferPtr& each : sent) finish(engine, each);
    return;
  }
  CHECK_EQ(receive(engine, 3, 0, 8)[0], 2.0f);
  CHECK_EQ(receive(engine, kLarge, 0, 7)[9], 1.0f);
  CHECK_EQ(receive(engine, kLarge, kAnyRank, 7)[9], 3.0f);
  CHECK_EQ(receive(engine, 3, 0, 7)[0], 4.0f);
}

/// Rank 0 receives from any rank; the result says from which one.
void any_source(Engine& engine) {
  for (const uint32_t count : {5u, static_cast<uint32_t>(kLarge)}) {
    if (engine.rank() != 0) {
      send(engine, std::vector<float>(count, static_cast<float>(engine.rank())), 0, count);
      continue;
    }
    std::vector<bool> seen(static_cast<size_t>(engine.size()));
    for (int i = 1; i < engine.size(); ++i) {
      std::vector<float> values(count);
      const TransferPtr received = post(engine, false, values, kAnyRank, count);
      finish(engine, received);
      CHECK_EQ(values.back(), static_cast<float>(received->source));
      CHECK(!seen[static_cast<size_t>(received->source)]);
      seen[static_cast<size_t>(received->source)] = true;
    }
  }
}

/// A ring of messages of which no thread waits for the sends, with allreduces under way.
void beside_collectives(Engine& engine) {
  const int next = (engine.rank() + 1) % engine.size();
  const int before = (engine.rank() + engine.size() - 1) % engine.size();
  for (int step = 0; step < 20; ++step) {
    std::vector<float> sums(50'000, 1.0f);
    std::vector<float> out(step % 2 == 0 ? kLarge : 10, static_cast<float>(engine.rank() + step));
    const OperationPtr sum = ranks::sum("sum" + std::to_string(step), sums);
    if (engine.rank() % 2 == 0) submit(engine, sum);
    const TransferPtr sent = post(engine, true, out, next);
    CHECK_EQ(receive(engine, out.size(), before).back(), static_cast<float>(before + step));
    if (engine.rank() % 2 != 0) submit(engine, sum);
    finish(engine, sum);
    finish(engine, sent);
    CHECK_EQ(sums.back(), static_cast<float>(engine.size()));
  }
}

/// Another size is an error of both ranks, or of the receiver alone if the sender has finished; the link stays usable.
void other_sizes(Engine& engine) {
  if (engine.rank() > 1) return;
  const auto is_refused = [&](auto body) {
    const Error error = check::thrown<Error>(body);
    CHECK(error.kind == ErrorKind::Mismatch);
    CHECK_EQ(error.asked.size(), 2U);
  };
  if (engine.rank() == 0) {
    send(engine, {1, 2, 3}, 1);
    is_refused([&] { send(engine, std::vector<float>(kLarge), 1); });
    send(engine, {5}, 1);
    return;
  }
  is_refused([&] { static_cast<void>(receive(engine, 2, 0)); });
  is_refused([&] { static_cast<void>(receive(engine, kLarge - 1, 0)); });
  CHECK_EQ(receive(engine, 1, 0)[0], 5.0f);
}

void impossible_peers(Engine& engine) {
  std::vector<float> values(1);
  for (const int peer : {engine.rank(), engine.size(), -2})
    for (const bool sends : {false, true})
      CHECK(check::thrown<Error>([&] { post(engine, sends, values, peer); }).kind == ErrorKind::Invalid);
  CHECK(check::thrown<Error>([&] { post(engine, true, values, kAnyRank); }).kind == ErrorKind::Invalid);
}

/// What nothing matches in time fails alone, and names the rank that it waited for.
void late(Engine& engine, std::atomic<bool>& over) {
  if (engine.rank() == 0) {
    for (const bool sends : {false, true}) {
      std::vector<float> values(kLarge);
      const Error error = check::thrown<Error>([&] { finish(engine, post(engine, sends, values, 1, 5)); });
      CHECK(error.kind == ErrorKind::Timeout);
      CHECK(error.ranks == std::vector<int>{1});
    }
    over = true;
  } else if (engine.rank() == 1) {
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // Rank 0 has withdrawn the message that it offered; it says so when it looks.
    std::vector<float> values(kLarge);
    const TransferPtr vain = post(engine, false, values, 0, 5);
    send(engine, {1}, 0);
    CHECK_EQ(receive(engine, 1, 0)[0], 2.0f);
    const Error error = check::thrown<Error>([&] { finish(engine, vain); });
    CHECK(error.kind == ErrorKind::Timeout);
  }
  if (engine.rank() == 0) {
    CHECK_EQ(receive(engine, 1, 1)[0], 1.0f);
    send(engine, {2}, 1);
  }
}

/// The last rank leaves: what it has sent arrives, what needs it fails, and the others go on.
void departure(Engine& engine) {
  const int last = engine.size() - 1;
  if (engine.rank() == last) {
    send(engine, {6}, 0);
    return;
  }
  if (engine.rank() == 0) {
    CHECK_EQ(receive(engine, 1, last)[0], 6.0f);
    const Error error = check::thrown<Error>([&] { static_cast<void>(receive(engine, 1, last)); });
    CHECK(error.kind == ErrorKind::PeerLost);
    CHECK_EQ(error.rank, last);
    if (last > 1) send(engine, {7}, 1);
  }
  if (engine.rank() == 1 && last > 1) CHECK_EQ(receive(engine, 1, 0)[0], 7.0f);
}

/// All messages of a rank fail when it shuts down.
void own_shutdown(Engine& engine) {
  if (engine.rank() != 0) return;
  std::vector<float> values(kLarge);
  const TransferPtr waiting = post(engine, false, values, kAnyRank);
  engine.shutdown();
  // The others may leave first.
  for (const Error& error : {check::thrown<Error>([&] { finish(engine, waiting); }),
                             check::thrown<Error>([&] { finish(engine, post(engine, false, values, 1)); })})
    CHECK(error.kind == ErrorKind::Closed || error.kind == ErrorKind::PeerLost);
}

void test_an_engine_without_links() {
  for (const std::string& problem : run({0, 0}, [](Engine& engine) {
         std::vector<float> values(1);
         CHECK(check::thrown<Error>([&] { post(engine, true, values, 1 - engine.rank()); }).kind == ErrorKind::Invalid);
       }))
    check::equal(problem, std::string());
}

void run_all(const std::vector<int>& hosts, const std::function<void(Engine&)>& body, double timeout = 20) {
  for (const std::string& problem : run(hosts, body, timeout, 8, false, true)) check::equal(problem, std::string());
}

}  // namespace

int main() {
  test_an_engine_without_links();
  for (const auto& hosts : kWorlds) {
    for (const auto& body : {all_pairs, order_and_tags, any_source, beside_collectives, other_sizes, impossible_peers,
                             departure, own_shutdown})
      run_all(hosts, body);
    std::atomic<bool> over = false;
    run_all(hosts, [&over](Engine& engine) { late(engine, over); }, 1);
  }
  return check::report();
}
