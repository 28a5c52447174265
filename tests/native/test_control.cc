// A control stream over a link that moves random numbers of bytes.
#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <string>

#include "base/error.h"
#include "check.h"
#include "engine/control.h"

using namespace farandole;

namespace {

struct Wire {
  std::deque<std::byte> bytes;
  bool broken = false;
};

// Moves up to `most` bytes per call, possibly none.
class FitfulLink : public Link {
 public:
  FitfulLink(int peer, Wire& out, Wire& in, size_t most, unsigned seed)
      : Link(peer), out_(out), in_(in), most_(most), random_(seed) {}

  size_t try_send(std::span<const std::byte> bytes) override {
    if (out_.broken) throw Error::peer_lost("", peer(), "connection reset");
    const size_t count = std::min<size_t>(bytes.size(), random_() % (most_ + 1));
    out_.bytes.insert(out_.bytes.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  size_t try_recv(std::span<std::byte> bytes) override {
    if (in_.bytes.empty() && in_.broken) throw Error::peer_lost("", peer(), "connection reset");
    const size_t count = std::min<size_t>({bytes.size(), in_.bytes.size(), random_() % (most_ + 1)});
    std::copy_n(in_.bytes.begin(), count, bytes.begin());
    in_.bytes.erase(in_.bytes.begin(), in_.bytes.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  int fd() const override { return -1; }

 private:
  Wire& out_;
  Wire& in_;
  size_t most_;
  std::mt19937 random_;
};

CollectedRequests asks_of(uint32_t number, size_t name_length) {
  Request request;
  request.name = std::string(name_length, 'n');
  return {NumberRange{kSender, true, number, 1}, FullRequest{1, request}};
}

void test_messages_arrive_whole_and_in_order() {
  for (const size_t most : {size_t{1}, size_t{7}, size_t{100'000}}) {
    Wire there, back;
    ControlStream sender(std::make_unique<FitfulLink>(1, there, back, most, 1));
    ControlStream receiver(std::make_unique<FitfulLink>(0, back, there, most, 2));
    std::mt19937 random(3);
    uint32_t sent = 0;
    uint32_t got = 0;
    std::deque<size_t> lengths;
    while (got < 60) {
      if (sent < 60) {
        // Sometimes longer than the read-ahead.
        lengths.push_back(random() % 10 == 0 ? 40'000 : random() % 50);
        sender.send(asks_of(sent++, lengths.back()));
      }
      sender.flush();
      while (const auto message = receiver.receive()) {
        CHECK(std::get<CollectedRequests>(*message) == asks_of(got, lengths.front()));
        lengths.pop_front();
        ++got;
      }
    }
    CHECK(!receiver.lost() && !sender.lost());
  }
}

void test_last_words_arrive_before_the_loss() {
  Wire there, back;
  ControlStream sender(std::make_unique<FitfulLink>(1, there, back, 1000, 1));
  ControlStream receiver(std::make_unique<FitfulLink>(0, back, there, 1000, 2));
  sender.send(Departure{1, true, "it has shut down", 1});
  while (!sender.flush()) {
  }
  there.broken = true;
  back.broken = true;
  receiver.send(Departure{0, true, "", 0});  // to a peer that accepts no more bytes
  CHECK(!receiver.lost());
  std::optional<Message> message;
  for (int tries = 0; tries < 1000 && !message; ++tries) message = receiver.receive();
  CHECK(message && std::get<Departure>(*message).reason == "it has shut down");
  for (int tries = 0; tries < 10 && !receiver.lost(); ++tries) CHECK(!receiver.receive());
  CHECK(receiver.lost() && receiver.lost()->kind == ErrorKind::PeerLost);
  // A stream to a lost peer drops all messages.
  sender.send(Departure{1, true, "", 1});
  CHECK(sender.flush() && !sender.lost());
  CHECK(!sender.receive() && sender.lost());
}

void test_absurd_length() {
  Wire there, back;
  there.bytes.assign(8, std::byte{0xFF});
  ControlStream receiver(std::make_unique<FitfulLink>(0, back, there, 1000, 2));
  CHECK(CHECK_THROWS(Error,
                     [&] {
                       for (int tries = 0; tries < 100; ++tries) (void)receiver.receive();
                     }())
            .kind == ErrorKind::Internal);
}

}  // namespace

int main() {
  test_messages_arrive_whole_and_in_order();
  test_last_words_arrive_before_the_loss();
  test_absurd_length();
  return check::report();
}
