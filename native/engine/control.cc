#include "engine/control.h"

#include <algorithm>
#include <cstring>

namespace farandole {
namespace {

constexpr size_t kReadAhead = 16 << 10;

}  // namespace

bool ControlStream::push() {
  try {
    while (out_at_ < out_.size() && !closed_) {
      const size_t sent = link_->try_send(std::span(out_).subspan(out_at_));
      if (sent == 0) {
        waiting_.store(true, std::memory_order_relaxed);
        return false;
      }
      out_at_ += sent;
      sent_ = true;
    }
  } catch (const Error&) {
    // Bytes from before the peer's end may be unread and may explain it; receiving reports the loss.
    closed_ = true;
  }
  out_.clear();
  out_at_ = 0;
  waiting_.store(false, std::memory_order_relaxed);
  return true;
}

void ControlStream::send_heartbeat() {
  const std::lock_guard lock(sending_);
  // Unsent bytes are a sign of life too, once there is room.
  if (!sent_ && out_.empty()) {
    encode(Heartbeat{}, out_);
    push();
  }
  sent_ = false;
}

void ControlStream::pull() {
  if (lost_) return;
  // Grow with the bytes received, not with the length in a header.
  size_t wanted = kReadAhead;
  if (const size_t there = in_end_ - in_at_; there >= kFrameHeader) {
    const size_t frame = kFrameHeader + frame_length(std::span(in_).subspan(in_at_, kFrameHeader));
    wanted = std::max(wanted, std::min(frame, 2 * there));
  }
  if (in_.size() - in_at_ < wanted) {
    if (in_end_ > in_at_) std::memmove(in_.data(), in_.data() + in_at_, in_end_ - in_at_);
    in_end_ -= in_at_;
    in_at_ = 0;
    if (in_.size() < wanted) in_.resize(wanted);
  }
  try {
    const size_t got = link_->try_recv(std::span(in_).subspan(in_end_));
    in_end_ += got;
    if (got > 0) received_.store(true, std::memory_order_relaxed);
  } catch (const Error& error) {
    lost_ = error;
  }
}

std::optional<Message> ControlStream::receive() {
  const auto complete = [&]() -> size_t {
    const size_t there = in_end_ - in_at_;
    if (there < kFrameHeader) return 0;
    const size_t length = kFrameHeader + frame_length(std::span(in_).subspan(in_at_, kFrameHeader));
    return there >= length ? length : 0;
  };
  size_t length = complete();
  if (length == 0) {
    pull();
    length = complete();
  }
  if (length == 0) return std::nullopt;
  Message message = decode(std::span(in_).subspan(in_at_ + kFrameHeader, length - kFrameHeader));
  in_at_ += length;
  if (in_at_ == in_end_) in_at_ = in_end_ = 0;
  return message;
}

}  // namespace farandole
