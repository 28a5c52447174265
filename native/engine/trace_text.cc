#include "engine/trace_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kPiece = size_t{256} << 10;
constexpr size_t kUsual = 512;  // typical bytes per operation

void add_number(uint64_t value, std::string& out) {
  std::array<char, 24> digits;
  const char* const end = std::to_chars(digits.begin(), digits.end(), value).ptr;
  out.append(digits.data(), static_cast<size_t>(end - digits.data()));
}

/// Appends nanoseconds as microseconds.
void add_time(uint64_t ns, std::string& out) {
  add_number(ns / 1000, out);
  const auto rest = static_cast<unsigned>(ns % 1000);
  const std::array<char, 4> part{'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
                                 static_cast<char>('0' + rest % 10)};
  out.append(part.data(), part.size());
}

std::string json_of(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "\"";
  for (const char each : text) {
    const auto code = static_cast<unsigned char>(each);
    if (each == '"' || each == '\\') (out += '\\') += each;
    else if (code < 0x20) ((out += "\\u00") += kHex[code >> 4]) += kHex[code & 15];
    else out += each;
  }
  return out += '"';
}

}  // namespace

void TraceText::take(TraceBatch batch, std::string_view label) {
  batch_ = std::move(batch);
  label_ = label;
  at_ = 0;
  of_names_.assign(batch_.names().size(), nullptr);
}

std::string TraceText::next() {
  std::string out;
  out.reserve(std::min(kPiece, batch_.size() * kUsual) + kUsual);
  for (; at_ < batch_.size() && out.size() < kPiece; ++at_)
    batch_.visit_phases(at_, [&](const TraceEvent& event) { add(event, out); });
  if (at_ == batch_.size()) take({}, label_);  // free its memory
  return out;
}

const TraceText::Track& TraceText::track_of(uint32_t name, std::string& out) {
  if (of_names_[name] != nullptr) return *of_names_[name];
  const std::string& tensor = batch_.names()[name];
  const std::string shown = label_ + tensor;
  const auto [place, is_new] = tracks_.try_emplace(shown);
  Track& track = place->second;
  if (is_new) {
    track = {std::to_string(tracks_.size()), json_of(tensor)};
    if (!out.empty()) out += ",\n";
    out += R"({"name":"thread_name","ph":"M","args":{"name":)" + json_of(shown) + R"(},"pid":)" + rank_ + R"(,"tid":)" +
           track.number + "}";
  }
  of_names_[name] = &track;
  return track;
}

void TraceText::add(const TraceEvent& event, std::string& out) {
  const Track& track = track_of(event.name, out);
  if (!out.empty()) out += ",\n";
  ((out += R"({"name":")") += event.phase) += R"(","ts":)";
  add_time(event.begin_ns, out);
  (((out += R"(,"pid":)") += rank_) += R"(,"tid":)") += track.number;
  if (std::string_view(event.phase) == "plan") {
    out += R"(,"ph":"i","s":"p","args":{"buckets":)";
    add_number(event.buckets, out);
    out += "}}";
    return;
  }
  out += R"(,"ph":"X","dur":)";
  add_time(event.end_ns - event.begin_ns, out);
  if (event.algorithm != nullptr) {
    ((out += R"(,"args":{"tensor":)") += track.tensor) += R"(,"bytes":)";
    add_number(event.bytes, out);
    ((out += R"(,"algorithm":")") += event.algorithm) += R"("})";
  }
  out += '}';
}

}  // namespace farandole
