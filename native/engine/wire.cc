#include "engine/wire.h"

#include <bit>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

namespace farandole {
namespace {

enum class Tag : uint8_t { Gathered = 1, Plan = 2, Farewell = 3, Heartbeat = 4 };

/// How an item of a Gathered, or an entry of a bundle, is written.
enum class Item : uint8_t { SendersNumbers = 0, RanksNumbers = 1, Spelled = 2 };
enum class Form : uint8_t { Numbers = 0, Full = 1, WithRequest = 2 };

/// Integers as little-endian base-128 groups (LEB128); signed ones zigzag; floats as their eight bytes.
class Writer {
 public:
  explicit Writer(Bytes& out) : out_(out), start_(out.size()) { out_.resize(start_ + kFrameHeader); }

  void close() {
    const auto length = static_cast<uint32_t>(out_.size() - start_ - kFrameHeader);
    for (size_t i = 0; i < kFrameHeader; ++i) out_[start_ + i] = static_cast<std::byte>(length >> (8 * i));
  }
  void byte(uint8_t value) { out_.push_back(static_cast<std::byte>(value)); }
  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) byte(static_cast<uint8_t>(value | 0x80));
    byte(static_cast<uint8_t>(value));
  }
  void integer(int64_t value) { number(static_cast<uint64_t>(value) << 1 ^ static_cast<uint64_t>(value >> 63)); }
  void real(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int i = 0; i < 8; ++i) byte(static_cast<uint8_t>(bits >> (8 * i)));
  }
  void text(const std::string& value) {
    number(value.size());
    const auto* begin = reinterpret_cast<const std::byte*>(value.data());
    out_.insert(out_.end(), begin, begin + value.size());
  }
  void integers(const std::vector<int64_t>& values) {
    number(values.size());
    for (const int64_t value : values) integer(value);
  }

 private:
  Bytes& out_;
  size_t start_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> body) : left_(body) {}

  [[nodiscard]] bool at_end() const { return left_.empty(); }
  uint8_t byte() {
    if (left_.empty()) fail();
    const auto value = static_cast<uint8_t>(left_[0]);
    left_ = left_.subspan(1);
    return value;
  }
  uint8_t below(uint8_t limit) {
    const uint8_t value = byte();
    if (value >= limit) fail();
    return value;
  }
  uint64_t number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t next = byte();
      value |= static_cast<uint64_t>(next & 0x7f) << shift;
      if (next < 0x80) return value;
    }
    fail();
  }
  uint32_t small_number() {
    const uint64_t value = number();
    if (value > 0xffffffff) fail();
    return static_cast<uint32_t>(value);
  }
  /// A count of things that take at least one byte each.
  size_t count() {
    const uint64_t value = number();
    if (value > left_.size()) fail();
    return value;
  }
  int64_t integer() {
    const uint64_t value = number();
    return static_cast<int64_t>(value >> 1 ^ (~(value & 1) + 1));
  }
  int32_t small_integer() {
    const int64_t value = integer();
    if (value != static_cast<int32_t>(value)) fail();
    return static_cast<int32_t>(value);
  }
  int32_t rank() {
    const int32_t value = small_integer();
    if (value < 0) fail();
    return value;
  }
  int64_t size() {
    const int64_t value = integer();
    if (value < 0) fail();
    return value;
  }
  double real() {
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits |= static_cast<uint64_t>(byte()) << (8 * i);
    return std::bit_cast<double>(bits);
  }
  std::string text() {
    const size_t length = count();
    std::string value(reinterpret_cast<const char*>(left_.data()), length);
    left_ = left_.subspan(length);
    return value;
  }
  std::vector<int64_t> sizes() {
    std::vector<int64_t> values(count());
    for (int64_t& value : values) value = size();
    return values;
  }
  [[noreturn]] static void fail() { throw Error::internal("a control message is damaged"); }

 private:
  std::span<const std::byte> left_;
};

void write(Writer& w, const Request& request) {
  w.text(request.name);
  w.byte(static_cast<uint8_t>(request.kind));
  w.byte(static_cast<uint8_t>(request.dtype));
  w.byte(static_cast<uint8_t>(request.op));
  w.byte(request.cacheable ? 1 : 0);
  w.real(request.prescale);
  w.real(request.postscale);
  w.integer(request.root);
  w.integers(request.shape);
  w.integers(request.splits);
  w.text(request.group);
  w.number(request.group_size);
}

Request read_request(Reader& r) {
  Request request;
  request.name = r.text();
  request.kind = static_cast<Kind>(r.below(kKinds));
  request.dtype = static_cast<DType>(r.below(kDTypes));
  request.op = static_cast<ReduceOp>(r.below(6));
  request.cacheable = r.below(2) != 0;
  request.prescale = r.real();
  request.postscale = r.real();
  request.root = r.small_integer();
  request.shape = r.sizes();
  request.splits = r.sizes();
  request.group = r.text();
  request.group_size = r.small_number();
  // The negotiator reads the first dimension of these without asking again.
  if ((request.kind == Kind::Allgather || request.kind == Kind::Alltoall) && request.shape.empty()) Reader::fail();
  return request;
}

void write(Writer& w, const Error& error) {
  w.byte(static_cast<uint8_t>(error.kind));
  w.text(error.name);
  w.text(error.reason);
  w.text(error.what_differs);
  w.integer(error.rank);
  w.real(error.waited);
  w.number(error.ranks.size());
  for (const int rank : error.ranks) w.integer(rank);
  w.number(error.asked.size());
  for (const auto& [rank, text] : error.asked) {
    w.integer(rank);
    w.text(text);
  }
}

Error read_error(Reader& r) {
  const auto kind = static_cast<ErrorKind>(r.byte());
  std::string name = r.text();
  std::string reason = r.text();
  std::string what = r.text();
  const int32_t lost = r.small_integer();
  const double waited = r.real();
  std::vector<int> ranks(r.count());
  for (int& rank : ranks) rank = r.small_integer();
  std::map<int, std::string> asked;
  for (size_t left = r.count(); left > 0; --left) {
    const int rank = r.small_integer();
    asked[rank] = r.text();
  }
  // All that a negotiation ends with.
  if (kind == ErrorKind::Joined) return Error::joined(std::move(name), std::move(reason));
  if (kind == ErrorKind::Mismatch) return Error::mismatch(std::move(name), std::move(what), std::move(asked));
  if (kind == ErrorKind::PeerLost) return Error::peer_lost(std::move(name), lost, std::move(reason));
  if (kind == ErrorKind::Timeout) return Error::timeout(std::move(name), std::move(ranks), waited);
  Reader::fail();
}

/// A run of numbers, which ends before kNoId.
void write_run(Writer& w, uint32_t first, uint32_t count) {
  w.number(first);
  w.number(count);
}

std::pair<uint32_t, uint32_t> read_run(Reader& r) {
  const uint32_t first = r.small_number();
  const uint32_t count = r.small_number();
  if (count == 0 || uint64_t{first} + count > kNoId) Reader::fail();
  return {first, count};
}

void write(Writer& w, const Numbers& numbers) {
  if (numbers.rank == kSender) {
    w.byte(static_cast<uint8_t>(Item::SendersNumbers));
  } else {
    w.byte(static_cast<uint8_t>(Item::RanksNumbers));
    w.integer(numbers.rank);
    w.byte(numbers.whole ? 1 : 0);
  }
  write_run(w, numbers.first, numbers.count);
}

std::variant<Numbers, Spelled> read_item(Reader& r) {
  const auto item = static_cast<Item>(r.below(3));
  if (item == Item::Spelled) {
    const int32_t rank = r.rank();
    return Spelled{rank, read_request(r)};
  }
  Numbers numbers;
  if (item == Item::RanksNumbers) {
    numbers.rank = r.rank();
    numbers.whole = r.below(2) != 0;
  }
  std::tie(numbers.first, numbers.count) = read_run(r);
  return numbers;
}

/// How many of `entries`, from the first on, make one run of numbers, and of how many numbers.
std::pair<size_t, uint32_t> run_of(std::span<const Entry> entries) {
  size_t length = 1;
  uint32_t count = entries[0].count;
  while (length < entries.size() && entries[length].is_number() && entries[length].id == entries[0].id + count)
    count += entries[length++].count;
  return {length, count};
}

void write(Writer& w, const Bundle& bundle) {
  w.byte(static_cast<uint8_t>(bundle.kind));
  const std::span<const Entry> entries(bundle.entries);
  size_t forms = 0;
  for (size_t at = 0; at < entries.size(); ++forms)
    at += entries[at].is_number() ? run_of(entries.subspan(at)).first : 1;
  w.number(forms);
  for (size_t at = 0; at < entries.size();) {
    const Entry& entry = entries[at];
    if (entry.is_number()) {
      const auto [length, count] = run_of(entries.subspan(at));
      w.byte(static_cast<uint8_t>(Form::Numbers));
      write_run(w, entry.id, count);
      at += length;
    } else {
      w.byte(static_cast<uint8_t>(entry.request ? Form::WithRequest : Form::Full));
      w.number(entry.id);
      w.text(entry.name);
      w.integers(entry.sizes);
      if (entry.request) write(w, *entry.request);
      ++at;
    }
  }
}

Bundle read_bundle(Reader& r) {
  Bundle bundle;
  bundle.kind = static_cast<Kind>(r.below(kKinds));
  bundle.entries.resize(r.count());
  if (bundle.entries.empty()) Reader::fail();
  for (Entry& entry : bundle.entries) {
    const auto form = static_cast<Form>(r.below(3));
    if (form == Form::Numbers) {
      std::tie(entry.id, entry.count) = read_run(r);
      continue;
    }
    entry.id = r.small_number();
    entry.name = r.text();
    entry.sizes = r.sizes();
    if (form == Form::WithRequest) entry.request = read_request(r);
  }
  return bundle;
}

}  // namespace

void encode(const Gathered& gathered, Bytes& out) {
  Writer w(out);
  w.byte(static_cast<uint8_t>(Tag::Gathered));
  w.number(gathered.size());
  for (const auto& item : gathered) {
    if (const auto* numbers = std::get_if<Numbers>(&item)) {
      write(w, *numbers);
      continue;
    }
    const auto& spelled = std::get<Spelled>(item);
    w.byte(static_cast<uint8_t>(Item::Spelled));
    w.integer(spelled.rank);
    write(w, spelled.request);
  }
  w.close();
}

void encode(const Plan& plan, Bytes& out) {
  Writer w(out);
  w.byte(static_cast<uint8_t>(Tag::Plan));
  w.number(plan.size());
  for (const auto& item : plan) {
    w.byte(static_cast<uint8_t>(item.index()));
    if (const auto* bundle = std::get_if<Bundle>(&item)) {
      write(w, *bundle);
    } else {
      const auto& refusal = std::get<Refusal>(item);
      w.text(refusal.name);
      write(w, refusal.error);
    }
  }
  w.close();
}

void encode(const Farewell& farewell, Bytes& out) {
  Writer w(out);
  w.byte(static_cast<uint8_t>(Tag::Farewell));
  w.integer(farewell.rank);
  w.byte(farewell.clean ? 1 : 0);
  w.text(farewell.reason);
  w.integer(farewell.first);
  w.close();
}

void encode(const Heartbeat&, Bytes& out) {
  Writer w(out);
  w.byte(static_cast<uint8_t>(Tag::Heartbeat));
  w.close();
}

uint32_t frame_length(std::span<const std::byte> header) {
  uint32_t length = 0;
  for (size_t i = 0; i < kFrameHeader; ++i) length |= static_cast<uint32_t>(header[i]) << (8 * i);
  if (length == 0 || length > kLongestFrame) Reader::fail();
  return length;
}

Message decode(std::span<const std::byte> body) {
  Reader r(body);
  Message message;
  switch (static_cast<Tag>(r.byte())) {
    case Tag::Gathered: {
      Gathered gathered;
      for (size_t left = r.count(); left > 0; --left) gathered.push_back(read_item(r));
      message = std::move(gathered);
      break;
    }
    case Tag::Plan: {
      Plan plan;
      for (size_t left = r.count(); left > 0; --left) {
        if (r.below(2) == 0) {
          plan.emplace_back(read_bundle(r));
        } else {
          std::string name = r.text();
          plan.emplace_back(Refusal{std::move(name), read_error(r)});
        }
      }
      message = std::move(plan);
      break;
    }
    case Tag::Farewell: {
      Farewell farewell;
      farewell.rank = r.small_integer();
      farewell.clean = r.below(2) != 0;
      farewell.reason = r.text();
      farewell.first = r.small_integer();
      message = std::move(farewell);
      break;
    }
    case Tag::Heartbeat: message = Heartbeat{}; break;
    default: Reader::fail();
  }
  if (!r.at_end()) Reader::fail();
  return message;
}

}  // namespace farandole
