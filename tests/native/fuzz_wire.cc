// Fuzz target: for any bytes of a peer, the decoder throws Error (Internal) or reads a message that encode() can write.
// Built with fuzz_driver.cc by default; with Clang, -fsanitize=fuzzer can serve as its main().
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <span>

#include "base/error.h"
#include "engine/control.h"
#include "engine/wire.h"

using namespace farandole;

namespace {

// Aborts in every kind of build, because fuzzers look for a crash.
void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "fuzz_wire: " << what << std::endl;
  std::abort();
}

Bytes encoded(const Message& message) {
  Bytes frame;
  std::visit([&](const auto& payload) { encode(payload, frame); }, message);
  return frame;
}

std::span<const std::byte> body_of(const Bytes& frame) { return std::span(frame).subspan(kFrameHeader); }

/// Returns the message in `body` as encode() writes it; empty if it is not a message.
Bytes normal_form(std::span<const std::byte> body) {
  try {
    return encoded(decode(body));
  } catch (const Error& error) {
    require(error.kind == ErrorKind::Internal, "a damaged message is another kind of error");
    return {};
  }
}

void fuzz_body(std::span<const std::byte> body) {
  const Bytes frame = normal_form(body);
  if (frame.empty()) return;
  require(frame_length(std::span(frame).first(kFrameHeader)) == frame.size() - kFrameHeader,
          "a frame's length is wrong");
  require(normal_form(body_of(frame)) == frame, "what was read and written is read as something else");
}

/// A peer whose recorded bytes arrive a few at a time.
class Recording final : public Link {
 public:
  Recording(std::span<const std::byte> bytes, size_t chunk) : Link(1), left_(bytes), chunk_(chunk) {}

  size_t try_send(std::span<const std::byte> bytes) override { return bytes.size(); }
  size_t try_recv(std::span<std::byte> bytes) override {
    const size_t count = std::min({bytes.size(), left_.size(), chunk_});
    std::copy_n(left_.begin(), count, bytes.begin());
    left_ = left_.subspan(count);
    return count;
  }
  int fd() const override { return -1; }
  bool all_read() const { return left_.empty(); }

 private:
  std::span<const std::byte> left_;
  size_t chunk_;
};

/// Sends `body` twice as frames and then `body` itself as a stream. The first two must be received, however they are
/// cut.
void fuzz_stream(std::span<const std::byte> body, size_t chunk) {
  const Bytes frame = normal_form(body);
  Bytes stream;
  for (int i = 0; i < 2; ++i) stream.insert(stream.end(), frame.begin(), frame.end());
  stream.insert(stream.end(), body.begin(), body.end());

  auto link = std::make_unique<Recording>(stream, chunk);
  const Recording& recording = *link;
  ControlStream control(std::move(link));
  size_t heard = 0;
  try {
    for (size_t silent = 0; silent < 2;) {
      const auto message = control.receive();
      if (message && heard < 2 && !frame.empty()) require(encoded(*message) == frame, "a frame changed on its way");
      heard += message ? 1 : 0;
      silent = message || !recording.all_read() ? 0 : silent + 1;
    }
  } catch (const Error& error) {
    require(error.kind == ErrorKind::Internal, "a damaged stream is another kind of error");
  }
  require(frame.empty() || heard >= 2, "a frame was not heard");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto body = std::as_bytes(std::span(data, size));
  fuzz_body(body);
  fuzz_stream(body, size % 7 + 1);
  return 0;
}
