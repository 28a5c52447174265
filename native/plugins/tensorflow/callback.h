#pragma once

namespace farandole::tensorflow {

/// A copy of libstdc++'s std::function<void()>, which TensorFlow's C interface passes without saying so. Its layout has
/// been the same since GCC 5. We may be built with another C++ library, whose std::function differs.
class Callback {
 public:
  Callback(const Callback& other) {
    if (other.manage_ == nullptr) return;
    other.manage_(data_, other.data_, Order::Copy);
    manage_ = other.manage_;
    call_ = other.call_;
  }
  ~Callback() {
    if (manage_ != nullptr) manage_(data_, data_, Order::Destroy);
  }
  Callback& operator=(const Callback&) = delete;

 private:
  enum class Order : int { Copy = 2, Destroy = 3 };
  struct alignas(void*) Data {
    char bytes[2 * sizeof(void*)];
  };

  Data data_ = {};
  bool (*manage_)(Data& to, const Data& from, Order order) = nullptr;  // null: there is no function
  void (*call_)(const Data& data) = nullptr;
};
static_assert(sizeof(Callback) == 4 * sizeof(void*));

}  // namespace farandole::tensorflow
